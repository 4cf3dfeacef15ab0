"""Completeness: every way in which a checkpoint can fail to be the model fails at once, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hemiola.config.model import NemotronHConfig
from hemiola.errors import CheckpointError
from hemiola.formats.checkpoint import INDEX, Checkpoint
from hemiola.formats.manifest import Manifest
from hemiola.formats.weight import Scheme
from tests.support.damage import change_json, change_tensors, shard, truncate, weight_map
from tests.support.tiny_checkpoint import write_tiny_checkpoint
from tests.support.variants import tiny

Tensors = dict[str, Tensor]
SCHEMES = ("bf16", "fp8", "nvfp4", "lightning")
QUANTISED = ("fp8", "nvfp4", "lightning")
MIXER = "backbone.layers.{}.mixer"


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a three-shard checkpoint of a model with all kinds of layers, MEM*E-, and gives its folder."""

    def write(scheme: str = "bf16", raw: dict[str, Any] | None = None, **knobs: Any) -> Path:
        path = tmp_path / f"{scheme}-{len(list(tmp_path.iterdir()))}"
        write_tiny_checkpoint(path, raw or tiny("MEM*E-"), scheme, shards=3, **knobs)
        return path

    return write


def build(folder: Path) -> Manifest:
    return Manifest.build(Checkpoint.open(folder), NemotronHConfig.from_folder(folder))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        build(folder)
    assert str(folder) in str(error.value)
    assert error.value.remedy
    return str(error.value)


def drop(*names: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


@pytest.mark.parametrize("scheme", ["f32", *SCHEMES])
def test_a_whole_checkpoint_has_no_findings(folder: Callable[..., Path], scheme: str) -> None:
    path = folder(scheme)
    manifest = build(path)
    assert manifest.reports == ()
    assert sum(module.num_tensors for module in manifest.modules) == len(weight_map(path))
    sizes = sum(header.nbytes for header in manifest.checkpoint.headers.values())
    scalars = sum(module.num_scalars for module in manifest.modules)
    assert sum(module.stored_bytes for module in manifest.modules) == sizes - 4 * scalars
    found = {module.scheme for module in manifest.modules}
    expected = {"fp8": {Scheme.FP8}, "nvfp4": {Scheme.NVFP4}, "lightning": {Scheme.FP8, Scheme.NVFP4}}.get(
        scheme, set()
    )
    assert found == expected | {Scheme.PLAIN}


@pytest.mark.parametrize("scheme", SCHEMES)
class TestMissingParts:
    """Three shards; each loss fails with the names, whatever the scheme."""

    def test_a_missing_shard(self, folder: Callable[..., Path], scheme: str) -> None:
        path = folder(scheme)
        lost = [name for name, file in weight_map(path).items() if file == shard(path, 2).name]
        shard(path, 2).unlink()
        text = refusal(path)
        assert f"model-00002-of-00003.safetensors with {len(lost)} tensors" in text
        assert lost[0] in text

    def test_a_missing_shard_that_the_index_does_not_know_either(
        self, folder: Callable[..., Path], scheme: str
    ) -> None:
        path = folder(scheme)
        name = shard(path, 2).name
        lost = [tensor for tensor, file in weight_map(path).items() if file == name]
        shard(path, 2).unlink()
        change_json(path / INDEX, lambda index: [index["weight_map"].pop(tensor) for tensor in lost])
        text = refusal(path)
        modules = [tensor for tensor in lost if "scale" not in tensor]
        assert f"missing tensor ({len(modules)})" in text
        assert any(tensor in text for tensor in modules)

    def test_a_truncated_shard(self, folder: Callable[..., Path], scheme: str) -> None:
        path = folder(scheme)
        before, after = truncate(shard(path, 3), 40)
        assert f"model-00003-of-00003.safetensors, expected {before} bytes and found {after}" in refusal(path)

    def test_a_tensor_dropped_from_the_index(self, folder: Callable[..., Path], scheme: str) -> None:
        path = folder(scheme)
        change_json(path / INDEX, lambda index: index["weight_map"].pop("backbone.layers.3.mixer.q_proj.weight"))
        assert "in a shard but not in the index (1): backbone.layers.3.mixer.q_proj.weight" in refusal(path)

    def test_a_tensor_dropped_from_everywhere(self, folder: Callable[..., Path], scheme: str) -> None:
        path = folder(scheme)
        names = ("backbone.layers.0.mixer.in_proj.weight", "backbone.layers.0.mixer.A_log", "backbone.norm_f.weight")
        change_tensors(path, drop(*names))
        text = refusal(path)
        assert f"missing tensor (3): {', '.join(names)}" in text
        assert "does not have" not in text  # the scales of in_proj are not a second finding

    def test_a_tensor_that_nobody_consumes(self, folder: Callable[..., Path], scheme: str) -> None:
        path = folder(scheme)
        extra = "backbone.layers.1.mixer.experts.0.gate_proj.weight"
        change_tensors(path, lambda tensors: tensors.update({extra: torch.zeros(2)}))
        assert f"tensor that the model does not have (1): {extra}" in refusal(path)

    def test_shapes_and_dtypes(self, folder: Callable[..., Path], scheme: str) -> None:
        path = folder(scheme)
        out_proj, a_log, gate = (MIXER.format(n) + leaf for n, leaf in ((0, ".out_proj"), (2, ".A_log"), (1, ".gate")))

        def change(tensors: Tensors) -> None:
            tensors[f"{out_proj}.weight"] = tensors[f"{out_proj}.weight"][:-1].clone()
            tensors[a_log] = tensors[a_log][:, None].clone()
            tensors["backbone.norm_f.weight"] = torch.zeros(64, dtype=torch.int64)
            tensors[f"{gate}.weight"] = tensors[f"{gate}.weight"].to(torch.float8_e4m3fn)

        change_tensors(path, change)
        text = refusal(path)
        assert f"{a_log} is [8, 1], expected [8]" in text
        assert f"{out_proj}.weight is [63, {32 if scheme == 'nvfp4' else 64}]" in text
        assert "backbone.norm_f.weight is I64, expected BF16 or F16 or F32" in text
        assert f"{gate}.weight is F8_E4M3, expected BF16 or F16 or F32" in text
        assert "wrong shape (2)" in text
        assert "wrong dtype (2)" in text


def scale_names(folder: Path) -> list[str]:
    """One module's every scale: of an expert and, where it is quantised, of a mamba projection."""
    modules = ("backbone.layers.1.mixer.experts.3.up_proj", "backbone.layers.0.mixer.in_proj")
    return [name for name in weight_map(folder) if name.startswith(modules) and "scale" in name.rpartition(".")[2]]


@pytest.mark.parametrize("scheme", QUANTISED)
def test_one_scale_dropped(folder: Callable[..., Path], scheme: str) -> None:
    names = scale_names(folder(scheme))
    assert len(names) == {"fp8": 4, "nvfp4": 6, "lightning": 4}[scheme]
    for name in names:
        path = folder(scheme)
        change_tensors(path, drop(name))
        text = refusal(path)
        assert f"(1): {name}" in text
        assert "missing scale" in text or "missing input_scale" in text


def test_everything_is_reported_together(folder: Callable[..., Path]) -> None:
    path = folder("lightning")

    def change(tensors: Tensors) -> None:
        del tensors["backbone.layers.1.mixer.experts.3.up_proj.weight_scale_2"]
        del tensors["backbone.layers.3.mixer.v_proj.weight"]
        tensors["backbone.layers.0.mixer.D"] = torch.zeros(3)
        tensors["surprise"] = torch.zeros(3)

    change_tensors(path, change)
    text = refusal(path)
    assert "missing scale (1): backbone.layers.1.mixer.experts.3.up_proj.weight_scale_2" in text
    assert "missing tensor (1): backbone.layers.3.mixer.v_proj.weight" in text
    assert "wrong shape (1): backbone.layers.0.mixer.D is [3], expected [8]" in text
    assert "tensor that the model does not have (1): surprise" in text


def test_fp8_scales_must_be_one_number(folder: Callable[..., Path]) -> None:
    path = folder("fp8")
    name = "backbone.layers.0.mixer.in_proj"

    def change(tensors: Tensors) -> None:
        rows = tensors[f"{name}.weight"].shape[0]
        tensors[f"{name}.weight_scale"] = torch.ones(rows, 1)

    change_tensors(path, change)
    text = refusal(path)
    assert "per-channel and block-wise FP8 are not supported" in text
    assert f"{name}.weight_scale is [" in text


def test_scales_of_one_element_are_scalars_too(folder: Callable[..., Path]) -> None:
    path = folder("lightning")
    values: dict[str, float] = {}

    def change(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if tensor.dim() == 0:
                tensors[name] = tensor.reshape(1)
                values[name] = float(tensor)

    change_tensors(path, change)
    manifest = build(path)
    assert manifest.weight("lm_head").scale == values["lm_head.weight_scale_2"]
    name = "backbone.layers.0.mixer.in_proj"
    assert manifest.weight(name).input_scale == values[f"{name}.input_scale"]


@pytest.mark.parametrize(
    ("suffix", "replacement", "finding"),
    [
        ("weight_scale", torch.ones(32, 5).to(torch.float8_e4m3fn), "wrong shape (1): {} is [32, 5], expected [32, 4]"),
        ("weight_scale", torch.ones(32, 4), "wrong dtype (1): {} is F32, expected F8_E4M3"),
        ("weight_scale_2", torch.ones(2), "wrong shape (1): {} is [2], expected [] or [1]"),
        ("weight_scale_2", torch.tensor(1.0).bfloat16(), "wrong dtype (1): {} is BF16, expected F32"),
        ("weight", torch.zeros(32, 64, dtype=torch.uint8), "wrong shape (1): {} is [32, 64], expected [32, 32]"),
        ("weight", torch.zeros(32, 32, dtype=torch.int8), "wrong dtype (1): {} is I8, expected BF16 or F16 or F32 or"),
    ],
)
def test_nvfp4_shapes_and_dtypes(folder: Callable[..., Path], suffix: str, replacement: Tensor, finding: str) -> None:
    path = folder("nvfp4")
    name = f"backbone.layers.1.mixer.experts.3.up_proj.{suffix}"
    change_tensors(path, lambda tensors: tensors.update({name: replacement}))
    assert finding.format(name) in refusal(path)


def test_nvfp4_needs_whole_blocks(folder: Callable[..., Path]) -> None:
    path = folder(raw=tiny("E", moe_intermediate_size=24))
    name = "backbone.layers.0.mixer.experts.3.down_proj"

    def change(tensors: Tensors) -> None:
        tensors[f"{name}.weight"] = torch.zeros(64, 12, dtype=torch.uint8)
        tensors[f"{name}.weight_scale"] = torch.zeros(64, 1).to(torch.float8_e4m3fn)
        tensors[f"{name}.weight_scale_2"] = torch.tensor(1.0)

    change_tensors(path, change)
    assert f"NVFP4 module whose input size is no multiple of 16 (1): {name} has 24 inputs" in refusal(path)


class TestInputScalesOfExperts:
    """NVFP4 experts without an activation scale: named, or declared weight-only, never filled in."""

    def names(self, *experts: int) -> list[str]:
        return [f"backbone.layers.1.mixer.experts.{e}.{x}_proj.input_scale" for e in experts for x in ("up", "down")]

    def test_some_without_are_named(self, folder: Callable[..., Path]) -> None:
        path = folder("nvfp4")
        change_tensors(path, drop(*self.names(3, 5)))
        text = refusal(path)
        assert f"missing input_scale that its neighbours have (4): {', '.join(self.names(3, 5))}" in text

    def test_none_has_one_runs_weight_only_and_says_so(self, folder: Callable[..., Path]) -> None:
        path = folder("nvfp4")
        change_tensors(
            path, lambda tensors: drop(*[n for n in tensors if ".experts." in n and "input_scale" in n])(tensors)
        )
        manifest = build(path)
        (line,) = manifest.reports
        assert line.startswith("routed experts: declared NVFP4 with quantised activations, but no input_scale")
        assert "weight-only (32 modules)" in line
        assert manifest.weight("backbone.layers.1.mixer.experts.3.up_proj").input_scale is None
        assert manifest.weight("backbone.layers.0.mixer.in_proj").input_scale is not None

    def test_declared_weight_only_needs_none(self, folder: Callable[..., Path]) -> None:
        names = {name.rpartition(".")[0]: "W4A16_NVFP4" for name in self.names(3, 5)}
        assert build(folder("nvfp4", algorithms=names)).reports == ()


class TestDeclaration:
    """What is stored decides; the declaration is compared with it."""

    def test_a_disagreement_is_reported_and_the_stored_scheme_is_used(self, folder: Callable[..., Path]) -> None:
        path = folder("lightning")

        def change(config: dict[str, Any]) -> None:
            layers = config["quantization_config"]["quantized_layers"]
            layers["lm_head"] = {"quant_algo": "FP8"}
            del layers["backbone.layers.0.mixer.in_proj"]
            layers["backbone.layers.3.mixer.q_proj"] = {"quant_algo": "FP8"}
            config["quantization_config"]["ignore"].remove("backbone.layers.3.mixer.q_proj")
            layers["backbone.layers.0.mixer.conv1d"] = {"quant_algo": "FP8"}

        change_json(path / "config.json", change)
        manifest = build(path)
        assert set(manifest.reports) == {
            "declared FP8 but stored nvfp4, the stored scheme is used (1): lm_head",
            "declared unquantised but stored fp8, the stored scheme is used (1): backbone.layers.0.mixer.in_proj",
            "declared FP8 but stored plain, the stored scheme is used (2): "
            "backbone.layers.0.mixer.conv1d, backbone.layers.3.mixer.q_proj",
        }
        assert manifest.weight("lm_head").scheme is Scheme.NVFP4

    def test_exclusions_that_match_nothing_and_an_omitted_conv(self, folder: Callable[..., Path]) -> None:
        """Damaged exclusions change nothing: conv, norms and the mamba vectors are never quantised."""
        path = folder("nvfp4")

        def change(config: dict[str, Any]) -> None:
            names = config["quantization_config"]["ignore"]
            damaged = ["backbone.layers.0.mixer.conv1d_conv", "backbone.layers.99"]
            plain = [name for name in names if "conv1d" not in name]
            config["quantization_config"] = {"quant_algo": "NVFP4", "ignore": [*plain, *damaged]}

        change_json(path / "config.json", change)
        manifest = build(path)
        assert manifest.reports == (
            "declared names that match no module (2): backbone.layers.0.mixer.conv1d_conv, backbone.layers.99",
        )
        plain = [module for module in manifest.modules if not module.is_linear]
        assert {module.scheme for module in plain} == {Scheme.PLAIN}
        leaves = {"weight", "bias", "A_log", "D", "dt_bias", "e_score_correction_bias"}
        assert {module.name.rpartition(".")[2] for module in plain} == leaves

    def test_quantised_but_not_declared(self, folder: Callable[..., Path]) -> None:
        path = folder("fp8")
        change_json(path / "config.json", lambda config: config.pop("quantization_config"))
        (line,) = build(path).reports
        assert line.startswith("declared unquantised but stored fp8, the stored scheme is used (42): ")
        assert line.endswith("and 22 more")


class TestKVScales:
    def test_per_layer_value_and_source(self, folder: Callable[..., Path]) -> None:
        path = folder(raw=tiny("*M*M*"), kv_scales={0: (0.5, 2.0), 4: (0.25, None)})
        manifest = build(path)
        assert manifest.kv_scales(0) == (0.5, 2.0, "checkpoint")
        assert manifest.kv_scales(2) == (1.0, 1.0, "fallback 1.0")
        assert manifest.kv_scales(4) == (0.25, 1.0, "checkpoint, v_scale fallback 1.0")
        assert manifest.kv_cache_declared == "fp8"
        assert manifest.num_kv_scales == 3
        assert manifest.reports == (
            "KV scales not in the checkpoint, 1.0 is used: layer 2 k_scale, layer 2 v_scale, layer 4 v_scale",
        )

    def test_declared_without_any_scale_is_reported(self, folder: Callable[..., Path]) -> None:
        (line,) = build(folder(kv_scales={})).reports
        assert line == "KV scales not in the checkpoint, 1.0 is used: layer 3 k_scale, layer 3 v_scale"

    def test_nothing_to_say_where_nobody_asked(self, folder: Callable[..., Path]) -> None:
        manifest = build(folder())
        assert manifest.kv_cache_declared is None
        assert manifest.reports == ()


class TestLeftUnread:
    def test_the_draft_head_is_counted(self, folder: Callable[..., Path]) -> None:
        path = folder()
        extra = {
            "mtp.layers.0.eh_proj.weight": torch.zeros(64, 128),
            "mtp.layers.1.final_layernorm.weight": torch.ones(64),
        }
        change_tensors(path, lambda tensors: tensors.update(extra))
        manifest = build(path)
        num_bytes = 4 * (64 * 128 + 64)
        assert (manifest.num_mtp_tensors, manifest.mtp_bytes) == (2, num_bytes)
        assert manifest.reports == (f"2 tensors of the draft head (mtp.*, {num_bytes} bytes) are left unread",)

    def test_position_buffers_are_ignored_by_rule(self, folder: Callable[..., Path]) -> None:
        path = folder()
        name = "backbone.layers.3.mixer.rotary_emb.inv_freq"
        change_tensors(path, lambda tensors: tensors.update({name: torch.zeros(8)}))
        assert build(path).reports == (f"position buffers, of no use to this family, are left unread: {name}",)


class TestRoots:
    def rename(self, tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("backbone.")]:
            tensors["model." + name.removeprefix("backbone.")] = tensors.pop(name)

    def test_the_other_root(self, folder: Callable[..., Path]) -> None:
        path = folder("lightning")
        original = build(path).weight("backbone.layers.0.mixer.in_proj").data.view(torch.uint8).clone()
        change_tensors(path, self.rename)
        manifest = build(path)
        assert manifest.reports == ()
        assert torch.equal(manifest.weight("backbone.layers.0.mixer.in_proj").data.view(torch.uint8), original)
        assert manifest.tensor("backbone.norm_f.weight").shape == (64,)
        change_tensors(path, drop("model.norm_f.weight"))
        assert "missing tensor (1): model.norm_f.weight" in refusal(path)

    def test_both_roots_are_refused(self, folder: Callable[..., Path]) -> None:
        path = folder()
        change_tensors(path, lambda tensors: tensors.update({"model.norm_f.weight": torch.ones(64)}))
        assert "two roots in one checkpoint (1): backbone. and model." in refusal(path)
