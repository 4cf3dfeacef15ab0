"""The model's config: public variants against the published sizes, every spelling, every refusal."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hemiola.config.keys import FIXED, INERT, KEYS
from hemiola.config.model import LayerKind, NemotronHConfig
from hemiola.errors import ConfigError
from tests.support.variants import H_8B, NANO_30B, NEW_WORDS, OLD_WORDS, PUBLIC, SUPER, ULTRA, public, tiny

M, A, D, E = LayerKind.MAMBA, LayerKind.ATTENTION, LayerKind.MLP, LayerKind.MOE
patterns = st.text(alphabet="M*-E", min_size=1, max_size=60)


def read(raw: dict[str, Any]) -> NemotronHConfig:
    return NemotronHConfig.from_dict(raw)


def without(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if name not in names}


def refusal(raw: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read(raw)
    return caught.value


class Published(NamedTuple):
    """One column of the published table. Parameters in billions, states in bytes per layer, request state in MB."""

    counts: tuple[int, int, int, int]
    inner: int
    conv: int
    in_proj: int
    norm_group: int
    total: str
    active: str
    ssm_bytes: int
    conv_bytes: int
    request_mb: float
    kv_bytes: int


PUBLISHED = {
    "nano-3-30b-a3b": Published((23, 6, 0, 23), 4096, 6144, 10304, 512, "31.58", "3.23", 2097152, 36864, 49.08, 6144),
    "lightning-30b-a3b": Published(
        (23, 6, 0, 23), 4096, 6144, 10304, 512, "31.58", "3.23", 2097152, 36864, 49.08, 6144
    ),
    "super-120b-a12b": Published(
        (40, 8, 0, 40), 8192, 10240, 18560, 1024, "120.67", "12.23", 4194304, 61440, 170.2, 8192
    ),
    "ultra-550b-a55b": Published(
        (48, 12, 0, 48), 16384, 18432, 35072, 2048, "549.3", "55.0", 8388608, 110592, 408.0, 12288
    ),
    "nano-3-4b": Published((21, 4, 17, 0), 7680, 9728, 17504, 960, "3.97", "3.56", 3932160, 58368, 83.8, 16384),
    "nano-9b-v2": Published((27, 4, 25, 0), 10240, 12288, 22656, 1280, "8.89", "8.30", 5242880, 73728, 143.6, 16384),
    "nano-12b-v2": Published((28, 6, 28, 0), 10240, 12288, 22656, 1280, "12.31", "11.64", 5242880, 73728, 148.9, 24576),
    "h-4b": Published((24, 4, 24, 0), 7168, 9216, 16496, 896, "4.49", "4.09", 3670016, 55296, 89.4, 16384),
    "h-8b": Published((24, 4, 24, 0), 8192, 10240, 18560, 1024, "8.10", "7.56", 4194304, 61440, 102.1, 16384),
    "h-47b": Published((45, 5, 48, 0), 16384, 20480, 37120, 2048, "46.79", "45.72", 16777216, 122880, 760.5, 20480),
    "h-56b": Published((54, 10, 54, 0), 16384, 20480, 37120, 2048, "56.32", "55.25", 16777216, 122880, 912.6, 40960),
}


def count_parameters(c: NemotronHConfig) -> tuple[int, int]:
    """(all, active per token) without the draft head; active leaves out the embedding table and the idle experts."""
    mamba = c.in_proj_size * c.hidden_size + c.hidden_size * c.mamba_inner + c.mamba_inner
    mamba += c.conv_dim * (c.conv_kernel + c.use_conv_bias) + 3 * c.mamba_num_heads
    attention = 2 * c.hidden_size * c.head_dim * (c.num_attention_heads + c.num_key_value_heads)
    expert = 2 * c.expert_input_size * c.moe_intermediate_size
    around = c.num_experts * (c.hidden_size + 1) + 2 * c.hidden_size * c.shared_intermediate_size
    if c.latent_size is not None:
        around += 2 * c.hidden_size * c.latent_size
    layers = c.count(M) * mamba + c.count(A) * attention + c.count(E) * around
    layers += sum(2 * c.hidden_size * size for size in c.mlp_intermediate_sizes) + c.num_layers * c.hidden_size
    outside = c.vocab_size * c.hidden_size + c.hidden_size
    total = layers + outside + c.vocab_size * c.hidden_size + c.count(E) * c.num_experts * expert
    return total, layers + outside + c.count(E) * c.num_experts_per_tok * expert


@pytest.mark.parametrize("name", PUBLIC)
class TestPublicVariants:
    def test_sizes_equal_the_published_table(self, name: str) -> None:
        config, table = read(public(name)), PUBLISHED[name]
        assert tuple(config.count(kind) for kind in (M, A, D, E)) == table.counts
        assert (config.mamba_inner, config.conv_dim) == (table.inner, table.conv)
        assert (config.in_proj_size, config.gated_norm_group) == (table.in_proj, table.norm_group)
        assert len(config.mlp_intermediate_sizes) == table.counts[2]
        assert config.attention_scale == 128**-0.5

    def test_parameters_add_up_to_the_advertised_number(self, name: str) -> None:
        for parameters, advertised in zip(count_parameters(read(public(name))), PUBLISHED[name][5:7], strict=True):
            decimals = len(advertised.partition(".")[2])
            assert f"{parameters / 1e9:.{decimals}f}" == advertised

    def test_state_and_kv_bytes_equal_the_published_table(self, name: str) -> None:
        config, table = read(public(name)), PUBLISHED[name]
        ssm = config.mamba_num_heads * config.mamba_head_dim * config.ssm_state_size * 4
        conv = config.conv_dim * (config.conv_kernel - 1) * 2
        assert (ssm, conv) == (table.ssm_bytes, table.conv_bytes)
        assert config.count(M) * (ssm + conv) / 1e6 == pytest.approx(table.request_mb, abs=0.06)
        assert config.count(A) * 2 * config.num_key_value_heads * config.head_dim * 2 == table.kv_bytes

    def test_shared_facts_and_no_warning(self, name: str) -> None:
        config = read(public(name))
        assert config.warnings == ()
        assert (config.norm_eps, config.dtype, config.tie_word_embeddings) == (1e-5, "bfloat16", False)
        assert (config.ssm_groups, config.conv_kernel, config.use_conv_bias) == (8, 4, True)
        assert (config.time_step_limit, config.ssm_state_dtype) == ((0.0, math.inf), "float32")
        assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (1, (2,), 0)
        has_draft = name.startswith(("lightning", "super", "ultra"))
        assert (config.mtp_layers, config.num_mtp_steps) == (((A, E), 1) if has_draft else ((), 0))

    def test_every_key_is_used_inert_or_warned_about(self, name: str) -> None:
        raw = public(name)
        inert = set(read(raw).inert)
        assert inert < set(raw)
        spellings = {spelling for key in KEYS for spelling in key.spellings}
        schedule = {"num_hidden_layers", "num_nextn_predict_layers"}
        schedule |= {key for key in raw if key.endswith(("_pattern", "_types", "_block_type"))}
        for unused in set(raw) - inert:
            assert unused in spellings | schedule | set(FIXED) | {"architectures"}, unused

    def test_reads_the_same_from_a_folder(self, name: str, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(public(name)))
        assert NemotronHConfig.from_folder(tmp_path) == read(public(name))


@pytest.mark.parametrize(
    ("name", "kind", "indices"),
    [
        ("nano-3-30b-a3b", A, (5, 12, 19, 26, 33, 42)),
        ("nano-3-30b-a3b", M, tuple(i for i in range(52) if NANO_30B[i] == "M")),
        ("super-120b-a12b", A, (7, 16, 25, 36, 47, 58, 69, 78)),
        ("ultra-550b-a55b", A, (7, 14, 23, 32, 39, 48, 57, 64, 73, 82, 89, 98)),
        ("nano-3-4b", A, (12, 17, 24, 32)),
        ("nano-9b-v2", A, (14, 21, 30, 39)),
        ("nano-12b-v2", A, (7, 16, 25, 34, 43, 52)),
        ("h-8b", A, (7, 18, 29, 40)),
        ("h-47b", A, (17, 38, 49, 60, 86)),
        ("h-56b", A, tuple(range(7, 107, 11))),
        (
            "lightning-30b-a3b",
            E,
            (1, 3, 6, 8, 10, 13, 15, 17, 20, 22, 24, 27, 29, 31, 34, 36, 38, 40, 43, 45, 47, 49, 51),
        ),
    ],
)
def test_layer_indices(name: str, kind: LayerKind, indices: tuple[int, ...]) -> None:
    assert read(public(name)).indices(kind) == indices


def test_moe_fields_of_the_latent_model() -> None:
    c = read(public("super-120b-a12b"))
    assert (c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size) == (512, 22, 2688)
    assert (c.num_shared_experts, c.shared_intermediate_size) == (1, 5376)
    assert (c.latent_size, c.expert_input_size, c.routed_scaling_factor) == (1024, 1024, 5.0)
    assert (c.router_groups, c.topk_router_groups, c.norm_topk_prob) == (1, 1, True)
    nano = read(public("nano-3-30b-a3b"))
    assert (nano.latent_size, nano.expert_input_size) == (None, 2688)
    assert (nano.heads_per_ssm_group, nano.max_position_embeddings) == (8, 262144)


class TestSchedule:
    @given(patterns)
    def test_every_spelling_means_the_same(self, pattern: str) -> None:
        bare = without(tiny(pattern), "hybrid_override_pattern", "num_hidden_layers")
        spelled: list[dict[str, Any]] = [
            {"hybrid_override_pattern": pattern},
            {"hybrid_layer_pattern": pattern},
            {"hybrid_layer_pattern": pattern + "/*E"},
            {"layers_block_type": [OLD_WORDS[letter] for letter in pattern]},
            {"layer_types": [NEW_WORDS[letter] for letter in pattern]},
            {"layers_block_type": None, "hybrid_override_pattern": pattern},
        ]
        for schedule in spelled:
            config = read({**bare, **schedule, "num_hidden_layers": len(pattern), "num_nextn_predict_layers": 0})
            assert config.pattern == pattern
            assert config.num_layers == len(pattern)
            assert [config.layers[i] for i in config.indices(E)] == [E] * pattern.count("E")

    def test_a_list_wins_over_a_string_and_says_so(self) -> None:
        config = read(tiny("MEM", layers_block_type=["mamba", "mlp", "attention"]))
        assert config.pattern == "M-*"
        (warning,) = config.warnings
        assert 'hybrid_override_pattern: "MEM" is overruled by layers_block_type' in warning

    def test_the_first_list_and_the_first_string_win(self) -> None:
        config = read(tiny("ME", layers_block_type=["mamba", "mlp"], layer_types=["mlp", "mlp"]))
        assert config.pattern == "M-"
        assert [warning.split(": ")[1] for warning in config.warnings] == ["layer_types", "hybrid_override_pattern"]
        assert read(tiny("ME", hybrid_layer_pattern="EM")).pattern == "ME"

    def test_an_agreeing_second_spelling_is_inert(self) -> None:
        config = read(tiny("M*", layer_types=["linear_attention", "full_attention"]))
        assert config.warnings == ()
        assert "hybrid_override_pattern" in config.inert

    def test_an_overruled_string_may_be_anything(self) -> None:
        config = read(tiny("M|M", layers_block_type=["mamba", "mamba", "mlp"]))
        assert config.pattern == "MM-"
        assert "M|M" in config.warnings[0]

    @given(patterns, st.data())
    def test_an_unknown_letter_is_named_with_its_position(self, pattern: str, data: st.DataObject) -> None:
        letter = data.draw(st.characters(codec="ascii", exclude_characters="M*-E/", categories=("L", "N", "P", "S")))
        position = data.draw(st.integers(0, len(pattern)))
        error = refusal(tiny(pattern[:position] + letter + pattern[position:]))
        assert error.where == "config.json: hybrid_override_pattern"
        assert error.problem == f"unknown layer letter {letter!r}"
        assert error.found == f"{letter!r} at position {position}"

    def test_the_letter_error_reads_well(self) -> None:
        assert str(refusal(tiny("M-X*"))) == (
            "config.json: hybrid_override_pattern: unknown layer letter 'X'; found 'X' at position 2; "
            "expected one of 'M' (mamba), '*' (attention), '-' (mlp), 'E' (moe)"
        )

    def test_an_unknown_word_is_named_with_its_position(self) -> None:
        error = refusal(tiny("MM", layers_block_type=["mamba", "mamba2"]))
        assert error.where == "config.json: layers_block_type"
        assert error.found == "'mamba2' at position 1"
        assert error.expected == "one of mamba, linear_attention, attention, full_attention, mlp, moe"
        assert refusal(tiny("MM", layer_types=["mamba", 3])).found == "3 at position 1"

    @pytest.mark.parametrize(
        ("schedule", "where"),
        [
            ({}, "hybrid_override_pattern"),
            ({"layers_block_type": ["mamba", "moe", "mlp", "mamba"]}, "layers_block_type"),
            ({"layer_types": ["mamba", "moe", "mlp", "mamba"]}, "layer_types"),
        ],
    )
    def test_a_layer_count_that_contradicts_is_refused(self, schedule: dict[str, Any], where: str) -> None:
        error = refusal(tiny("MEME", **schedule, num_hidden_layers=5))
        assert error.where == "config.json: num_hidden_layers"
        assert error.found == f"5 layers here and 4 in {where}"

    def test_the_suffix_does_not_count_as_layers(self) -> None:
        raw = without(tiny("MEME"), "hybrid_override_pattern")
        assert read({**raw, "hybrid_layer_pattern": "MEME/*E", "num_hidden_layers": 4}).num_layers == 4

    @pytest.mark.parametrize(("key", "value"), [("layers_block_type", "MM"), ("hybrid_override_pattern", ["mamba"])])
    def test_wrong_types(self, key: str, value: object) -> None:
        assert refusal({**tiny("MM"), key: value}).where == f"config.json: {key}"

    def test_missing_and_empty(self) -> None:
        error = refusal(without(tiny("M"), "hybrid_override_pattern"))
        assert "schedule is missing" in str(error)
        assert "layers_block_type" in str(error)
        assert "empty" in str(refusal(tiny("")))
        assert "empty" in str(refusal(tiny("M", layers_block_type=[])))

    @pytest.mark.parametrize("pattern", ["M-M*-", "MEM*E", "M*", "-M", "M-ME*", "-", "*", "E"])
    def test_all_mixtures_are_read(self, pattern: str) -> None:
        assert read(tiny(pattern)).pattern == pattern


class TestDraftHead:
    def test_none_by_default_and_at_zero(self) -> None:
        for extra in ({}, {"num_nextn_predict_layers": 0}, {"num_nextn_predict_layers": None}):
            config = read(tiny("ME*", mtp_hybrid_override_pattern="*E", **extra))
            assert (config.mtp_layers, config.num_mtp_steps, config.warnings) == ((), 0, ())
            assert "mtp_hybrid_override_pattern" in config.inert

    @pytest.mark.parametrize(
        ("keys", "layers"),
        [
            ({}, (A, E)),
            ({"mtp_hybrid_override_pattern": "E*"}, (E, A)),
            ({"mtp_layers_block_type": ["moe"]}, (E,)),
            ({"mtp_layers_block_type": ["attention", "moe"]}, (A, E)),
            ({"mtp_layers_block_type": ["full_attention", "moe"], "mtp_hybrid_override_pattern": "EE"}, (E, E)),
            ({"mtp_layers_block_type": ["moe", "moe"], "mtp_hybrid_override_pattern": "*E"}, (E, E)),
        ],
    )
    def test_the_list_wins_unless_it_is_the_default(self, keys: dict[str, Any], layers: tuple[LayerKind, ...]) -> None:
        config = read(tiny("ME*", num_nextn_predict_layers=1, **keys))
        assert (config.mtp_layers, config.num_mtp_steps) == (layers, 1)
        assert len(config.warnings) == (1 if len(keys) == 2 else 0)

    def test_the_suffix_gives_layers_and_steps(self) -> None:
        raw = without(tiny("ME*"), "hybrid_override_pattern")
        config = read({**raw, "hybrid_layer_pattern": "ME*/E*/E*"})
        assert (config.pattern, config.mtp_layers, config.num_mtp_steps) == ("ME*", (E, A), 2)
        one = read({**raw, "hybrid_layer_pattern": "ME*/E*/E*", "num_nextn_predict_layers": 1})
        assert (one.mtp_layers, one.num_mtp_steps) == ((E, A), 1)
        assert "num_nextn_predict_layers: 1 overrules the 2 parts" in one.warnings[0]
        assert "steps of the draft head differ" in str(refusal({**raw, "hybrid_layer_pattern": "ME*/E*/*E"}))

    def test_only_attention_and_moe_are_legal(self) -> None:
        error = refusal(tiny("ME*", num_nextn_predict_layers=1, mtp_hybrid_override_pattern="ME"))
        assert (error.where, error.found) == ("config.json: mtp_hybrid_override_pattern", "'ME'")
        assert "position 1" in str(
            refusal(tiny("ME*", num_nextn_predict_layers=1, mtp_layers_block_type=["moe", "what"]))
        )

    def test_its_layers_count_as_present(self) -> None:
        assert read(tiny("M", num_nextn_predict_layers=1)).num_experts == 8
        assert "head_dim" in str(refusal(without(tiny("M", num_nextn_predict_layers=1), "head_dim")))


SPELLINGS = [
    # (field, keys, value expected, key overruled)
    ("ssm_groups", {"n_groups": 4}, 4, None),
    ("ssm_groups", {"mamba_n_groups": 4}, 4, None),
    ("ssm_groups", {"mamba_num_groups": 4}, 4, None),
    ("ssm_groups", {"n_groups": 2, "mamba_n_groups": 4}, 4, "n_groups"),
    ("ssm_groups", {"n_groups": 4, "mamba_num_groups": 2}, 4, "mamba_num_groups"),
    ("conv_kernel", {"mamba_d_conv": 3}, 3, None),
    ("conv_kernel", {"conv_kernel": 4, "mamba_d_conv": 3}, 3, "conv_kernel"),
    ("ssm_state_size", {"mamba_state_dim": 32}, 32, None),
    ("ssm_state_size", {"ssm_state_size": 64, "mamba_state_dim": 32}, 64, "mamba_state_dim"),
    ("chunk_size", {"mamba_chunk_size": 32}, 32, None),
    ("chunk_size", {"mamba_chunk_size": 32, "chunk_size": 64}, 32, "chunk_size"),
    ("use_conv_bias", {"use_conv_bias": True, "mamba_conv_bias": False}, False, "use_conv_bias"),
    ("use_conv_bias", {"use_conv_bias": False}, False, None),
    ("time_step_limit", {"mamba_dt_limit": [0.01, 0.1]}, (0.01, 0.1), None),
    ("time_step_limit", {"time_step_limit": [0, 1], "mamba_dt_limit": [0.01, 0.1]}, (0.01, 0.1), "time_step_limit"),
    ("time_step_limit", {"time_step_limit": [0.0, 1e30]}, (0.0, 1e30), None),
    ("time_step_limit", {"time_step_limit": [0.0, {"__float__": "Infinity"}]}, (0.0, math.inf), None),
    ("norm_eps", {"norm_eps": 1e-6}, 1e-6, None),
    ("norm_eps", {"rms_norm_eps": 1e-6}, 1e-6, None),
    ("norm_eps", {"layer_norm_epsilon": 1e-4, "norm_eps": 1e-6}, 1e-4, "norm_eps"),
    ("norm_eps", {"norm_eps": 1e-4, "rms_norm_eps": 1e-6}, 1e-4, "rms_norm_eps"),
    ("head_dim", {"attention_head_dim": 32}, 32, None),
    ("head_dim", {"head_dim": 64, "attention_head_dim": 32}, 64, "attention_head_dim"),
    ("head_dim", {"head_dim": None, "attention_head_dim": 32}, 32, None),
    ("num_key_value_heads", {"num_key_value_heads": None}, 4, None),
    ("dtype", {"dtype": "float16"}, "float16", None),
    ("dtype", {"torch_dtype": "float32"}, "float32", None),
    ("dtype", {"torch_dtype": None, "dtype": "float32"}, "float32", None),
    ("latent_size", {"moe_latent_size": None}, None, None),
    ("latent_size", {"moe_latent_size": 48}, 48, None),
    ("num_experts", {"num_local_experts": 16}, 16, None),
    ("num_experts", {"n_routed_experts": 4, "num_local_experts": 16}, 4, "num_local_experts"),
    ("ssm_state_dtype", {"mamba_ssm_cache_dtype": None}, "float32", None),
    ("ssm_state_dtype", {"mamba_ssm_dtype": "bfloat16"}, "float32", None),
    ("mlp_intermediate_sizes", {"intermediate_size": 96}, (96, 96), None),
    ("mlp_intermediate_sizes", {"intermediate_size": [96]}, (96, 96), None),
    ("mlp_intermediate_sizes", {"intermediate_size": [96, 160]}, (96, 160), None),
    ("num_shared_experts", {"n_shared_experts": 3}, 3, None),
    ("shared_intermediate_size", {"n_shared_experts": 3, "moe_shared_expert_intermediate_size": 80}, 240, None),
    ("shared_intermediate_size", {"n_shared_experts": 0, "moe_shared_expert_intermediate_size": 80}, 0, None),
    ("eos_token_ids", {"eos_token_id": [2, 11]}, (2, 11), None),
    ("eos_token_ids", {"eos_token_id": None}, (), None),
    ("bos_token_id", {"bos_token_id": None}, None, None),
    ("pad_token_id", {"pad_token_id": None}, None, None),
    ("tie_word_embeddings", {"tie_word_embeddings": True}, True, None),
    ("quantization", {"quantization_config": {"quant_algo": "FP8"}}, {"quant_algo": "FP8"}, None),
    ("quantization", {"quantization_config": None}, None, None),
    ("router_groups", {"n_group": 4, "topk_group": 2}, 4, None),
    ("topk_router_groups", {"n_group": 4, "topk_group": 2}, 2, None),
    ("norm_topk_prob", {"norm_topk_prob": False}, False, None),
]


@pytest.mark.parametrize(("field", "keys", "expected", "overruled"), SPELLINGS)
def test_spelling_and_precedence(field: str, keys: dict[str, Any], expected: object, overruled: str | None) -> None:
    spelled = next(key for key in KEYS if key.field == field).spellings
    bare = without(tiny("M-*E-"), *spelled, *keys)
    forward, backward = read({**bare, **keys}), read({**dict(reversed(keys.items())), **bare})
    assert getattr(forward, field) == getattr(backward, field) == expected
    assert [warning.split(": ")[1] for warning in forward.warnings] == ([overruled] if overruled else [])


def test_an_agreeing_legacy_name_is_inert() -> None:
    config = read(tiny("M", mamba_n_groups=2))
    assert (config.ssm_groups, config.warnings) == (2, ())
    assert "n_groups" in config.inert


def test_nothing_else_sets_the_inner_width_or_the_clamp() -> None:
    config = read(tiny("M", expand=7, mamba_expand=9, time_step_min=0.5, time_step_floor=0.4, mamba_dt_min=0.3))
    assert (config.mamba_inner, config.time_step_limit, config.warnings) == (64, (0.0, math.inf), ())


def test_class_defaults() -> None:
    config = read({"hybrid_override_pattern": H_8B, "head_dim": 128})
    assert (config.hidden_size, config.vocab_size, config.mlp_intermediate_sizes) == (4096, 131072, (21504,) * 24)
    assert (config.num_attention_heads, config.num_key_value_heads) == (32, 8)
    assert (config.mamba_num_heads, config.mamba_head_dim, config.ssm_groups) == (128, 64, 8)
    assert (config.ssm_state_size, config.conv_kernel, config.chunk_size) == (128, 4, 256)
    assert (config.norm_eps, config.dtype, config.time_step_limit) == (1e-5, "bfloat16", (0.0, math.inf))
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (1, (2,), 0)
    moe = read({"hybrid_override_pattern": "E"})
    assert (moe.num_experts, moe.num_experts_per_tok, moe.moe_intermediate_size) == (8, 2, 7688)
    assert (moe.num_shared_experts, moe.shared_intermediate_size, moe.routed_scaling_factor) == (1, 7688, 1.0)


def test_absent_kinds_need_no_keys_and_have_no_sizes() -> None:
    config = read({"hybrid_override_pattern": "-", "intermediate_size": 64, "hidden_size": 32, "vocab_size": 8})
    assert (config.head_dim, config.num_attention_heads, config.attention_scale) == (0, 0, 0.0)
    assert (config.mamba_inner, config.gated_norm_group, config.heads_per_ssm_group) == (0, 0, 0)
    assert (config.num_experts, config.shared_intermediate_size, config.latent_size) == (0, 0, None)
    moe_only = read(tiny("E"))
    assert (moe_only.mlp_intermediate_sizes, moe_only.mamba_inner) == ((), 0)
    assert {"intermediate_size", "head_dim", "n_groups"} <= set(moe_only.inert)


REFUSALS = [
    # (keys, where, words of the message)
    ({"head_dim": None}, "head_dim", ["missing", "head_dim or attention_head_dim"]),
    ({"mlp_hidden_act": "silu"}, "mlp_hidden_act", ['found "silu"', 'expected "relu2"']),
    ({"mamba_hidden_act": "relu2"}, "mamba_hidden_act", ['found "relu2"', 'expected "silu"']),
    ({"attention_bias": True}, "attention_bias", ["found true", "expected false"]),
    ({"mlp_bias": True}, "mlp_bias", ["found true"]),
    ({"use_bias": True}, "use_bias", ["found true"]),
    ({"mamba_proj_bias": 1}, "mamba_proj_bias", ["found 1", "expected false"]),
    ({"sliding_window": 4096}, "sliding_window", ["found 4096", "expected null"]),
    ({"model_type": "nemotron_h_puzzle"}, "model_type", ['found "nemotron_h_puzzle"', 'expected "nemotron_h"']),
    ({"architectures": ["LlamaForCausalLM"]}, "architectures", ["LlamaForCausalLM", "NemotronHForCausalLM"]),
    ({"hidden_size": "64"}, "hidden_size", ['found "64"', "an integer of at least 1"]),
    ({"hidden_size": True}, "hidden_size", ["found true"]),
    ({"hidden_size": 64.0}, "hidden_size", ["found 64.0"]),
    ({"hidden_size": None}, "hidden_size", ["found null"]),
    ({"vocab_size": 0}, "vocab_size", ["found 0"]),
    ({"mamba_head_dim": -8}, "mamba_head_dim", ["found -8"]),
    ({"conv_kernel": 1}, "conv_kernel", ["at least 2"]),
    ({"mamba_d_conv": "4"}, "mamba_d_conv", ['found "4"']),
    ({"num_hidden_layers": "5"}, "num_hidden_layers", ['found "5"']),
    ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers", ["found -1"]),
    ({"layer_norm_epsilon": 0.0}, "layer_norm_epsilon", ["above 0"]),
    ({"layer_norm_epsilon": "1e-5"}, "layer_norm_epsilon", ["a number"]),
    ({"norm_topk_prob": "true"}, "norm_topk_prob", ["true or false"]),
    ({"use_conv_bias": 1}, "use_conv_bias", ["true or false"]),
    ({"torch_dtype": "float64"}, "torch_dtype", ["float64", "bfloat16"]),
    ({"mamba_ssm_cache_dtype": "bfloat16"}, "mamba_ssm_cache_dtype", ['found "bfloat16"', 'expected "float32"']),
    ({"eos_token_id": -1}, "eos_token_id", ["found -1"]),
    ({"eos_token_id": [2, "11"]}, "eos_token_id", ['found "11"']),
    ({"quantization_config": "fp8"}, "quantization_config", ["an object"]),
    ({"time_step_limit": 0.1}, "time_step_limit", ["[low, high]"]),
    ({"time_step_limit": [0.0]}, "time_step_limit", ["[low, high]"]),
    ({"time_step_limit": [0.2, 0.1]}, "time_step_limit", ["low <= high"]),
    ({"time_step_limit": [0.0, "Infinity"]}, "time_step_limit", ["a number"]),
    ({"time_step_limit": [0.0, {"__float__": "NaN"}]}, "time_step_limit", ["a number"]),
    ({"time_step_limit": [0.0, {"__float__": []}]}, "time_step_limit", ["a number"]),
    ({"time_step_limit": [0.0, 10**400]}, "time_step_limit", ["a number"]),
    ({"mamba_dt_limit": [math.nan, 0.1]}, "mamba_dt_limit", ["a number"]),
    ({"num_key_value_heads": 3}, "num_key_value_heads", ["3 key/value heads for 4 query heads"]),
    ({"n_groups": 3}, "n_groups", ["3 groups for 8 mamba heads"]),
    ({"mamba_n_groups": 3}, "mamba_n_groups", ["3 groups for 8 mamba heads"]),
    ({"chunk_size": 48}, "chunk_size", ["found 48", "a power of two"]),
    ({"n_group": 3}, "n_group", ["3 groups of 8 experts"]),
    ({"n_group": 8}, "n_group", ["8 groups of 8 experts", "at least two experts"]),
    ({"n_group": 2, "topk_group": 3}, "topk_group", ["3 of 2 groups", "at most 2"]),
    ({"num_experts_per_tok": 9}, "num_experts_per_tok", ["9 experts per token of 8"]),
    ({"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, "num_experts_per_tok", ["3 experts per token of 2"]),
    ({"moe_latent_size": 0}, "moe_latent_size", ["found 0"]),
    ({"routed_scaling_factor": math.inf}, "routed_scaling_factor", ["found Infinity", "finite"]),
    ({"intermediate_size": [96, 96, 96]}, "intermediate_size", ["3 sizes for 2 MLP layers"]),
    ({"intermediate_size": []}, "intermediate_size", ["found []"]),
    ({"intermediate_size": [96, "96"]}, "intermediate_size", ['found "96"']),
]


@pytest.mark.parametrize(("keys", "where", "words"), REFUSALS)
def test_refusals_name_the_key_the_value_and_what_is_accepted(
    keys: dict[str, Any], where: str, words: list[str]
) -> None:
    error = refusal({**tiny("M-*E-"), **keys})
    assert error.where == f"config.json: {where}"
    for word in words:
        assert word in str(error)
    assert error.expected is not None


def test_head_dim_is_never_derived_from_the_hidden_size() -> None:
    raw = without(public("nano-3-30b-a3b"), "head_dim")
    assert "head_dim: missing" in str(refusal(raw))


@given(st.text(alphabet="abcdefgh_", min_size=1).filter(lambda name: name not in {*INERT, *FIXED}))
def test_an_unknown_key_is_warned_about_by_name(name: str) -> None:
    config = read(tiny("M", **{name: [1, {"deep": None}]}))
    assert config.warnings == (f'config.json: {name}: unknown key, ignored (value [1, {{"deep": null}}])',)
    assert name not in config.inert


def test_known_tables_do_not_overlap() -> None:
    spellings = [spelling for key in KEYS for spelling in key.spellings]
    assert len(spellings) == len(set(spellings))
    assert not set(spellings) & INERT
    assert not (set(spellings) | INERT) & set(FIXED)


def test_the_config_is_frozen_and_keeps_its_own_copy() -> None:
    raw = tiny("M", quantization_config={"exclude": ["lm_head"]})
    config = read(raw)
    raw["quantization_config"]["exclude"].append("x")
    assert config.quantization == {"exclude": ["lm_head"]}
    assert hash(config) == hash(read(tiny("M", quantization_config={"exclude": []})))
    with pytest.raises(FrozenInstanceError):
        config.hidden_size = 1  # type: ignore[misc]


class TestFile:
    @pytest.mark.parametrize("infinity", ["Infinity", '{"__float__": "Infinity"}', "1e999"])
    def test_infinity_in_every_json_form(self, infinity: str, tmp_path: Path) -> None:
        text = json.dumps(tiny("M", time_step_limit="HERE")).replace('"HERE"', f"[0.0, {infinity}]")
        (tmp_path / "config.json").write_text(text)
        assert NemotronHConfig.from_folder(str(tmp_path)).time_step_limit == (0.0, math.inf)

    def test_a_key_given_twice_is_warned_about(self, tmp_path: Path) -> None:
        text = json.dumps(tiny("M")).replace('"n_groups": 8', '"n_groups": 1, "n_groups": 8')
        text = text.replace('"n_groups": 2', '"n_groups": 1, "n_groups": 2')
        (tmp_path / "config.json").write_text(text)
        config = NemotronHConfig.from_folder(tmp_path)
        assert config.ssm_groups == 2
        assert config.warnings == (f"{tmp_path}/config.json: n_groups: given twice, 1 is overruled by 2",)

    def test_errors_name_the_file(self, tmp_path: Path) -> None:
        file = tmp_path / "config.json"
        with pytest.raises(ConfigError, match=r"config\.json: no such file"):
            NemotronHConfig.from_folder(tmp_path)
        for text, message in [("{,}", "not valid JSON"), ("[1]", "not a JSON object"), ("\xff", "not valid JSON")]:
            file.write_text(text, encoding="latin-1")
            with pytest.raises(ConfigError, match=message) as caught:
                NemotronHConfig.from_folder(tmp_path)
            assert str(file) in str(caught.value)
        file.write_text(json.dumps(tiny("M?")))
        with pytest.raises(ConfigError, match="position 1") as caught:
            NemotronHConfig.from_folder(tmp_path)
        assert caught.value.where == f"{file}: hybrid_override_pattern"
        file.unlink()
        file.mkdir()
        with pytest.raises(ConfigError, match="cannot be read"):
            NemotronHConfig.from_folder(tmp_path)


def test_patterns_of_the_variants_have_their_published_lengths() -> None:
    assert [len(pattern) for pattern in (NANO_30B, SUPER, ULTRA, H_8B)] == [52, 88, 108, 52]
