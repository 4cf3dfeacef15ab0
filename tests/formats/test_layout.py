"""The expected inventory against published names, shapes and parameter totals."""

from __future__ import annotations

import math

import pytest

from hemiola.config.model import NemotronHConfig
from hemiola.formats.layout import Module, Role, canonical, expected_modules
from tests.support.variants import public, tiny


def modules(raw: dict[str, object]) -> dict[str, Module]:
    found = list(expected_modules(NemotronHConfig.from_dict(raw)))
    assert len({module.tensor_name for module in found}) == len(found)
    return {module.name: module for module in found}


# Advertised parameter totals in billions.
TOTALS = {
    "nano-3-30b-a3b": 31.58,
    "lightning-30b-a3b": 31.58,
    "super-120b-a12b": 120.67,
    "ultra-550b-a55b": 549.3,
    "nano-3-4b": 3.97,
    "nano-9b-v2": 8.89,
    "nano-12b-v2": 12.31,
    "h-4b": 4.49,
    "h-8b": 8.10,
    "h-47b": 46.79,
    "h-56b": 56.32,
}


@pytest.mark.parametrize("name", TOTALS)
def test_parameter_totals_of_public_models(name: str) -> None:
    total = sum(math.prod(module.shape) for module in modules(public(name)).values()) / 1e9
    assert total == pytest.approx(TOTALS[name], abs=0.05 if total > 500 else 0.006)


def test_names_and_shapes_of_the_30b_geometry() -> None:
    found = modules(public("nano-3-30b-a3b"))
    expected = {
        "backbone.embeddings": (131072, 2688),
        "backbone.layers.0.norm.weight": (2688,),
        "backbone.layers.0.mixer.in_proj": (10304, 2688),
        "backbone.layers.0.mixer.conv1d.weight": (6144, 1, 4),
        "backbone.layers.0.mixer.conv1d.bias": (6144,),
        "backbone.layers.0.mixer.A_log": (64,),
        "backbone.layers.0.mixer.D": (64,),
        "backbone.layers.0.mixer.dt_bias": (64,),
        "backbone.layers.0.mixer.norm.weight": (4096,),
        "backbone.layers.0.mixer.out_proj": (2688, 4096),
        "backbone.layers.5.mixer.q_proj": (4096, 2688),
        "backbone.layers.5.mixer.k_proj": (256, 2688),
        "backbone.layers.5.mixer.v_proj": (256, 2688),
        "backbone.layers.5.mixer.o_proj": (2688, 4096),
        "backbone.layers.1.mixer.gate": (128, 2688),
        "backbone.layers.1.mixer.gate.e_score_correction_bias": (128,),
        "backbone.layers.1.mixer.experts.127.up_proj": (1856, 2688),
        "backbone.layers.1.mixer.experts.127.down_proj": (2688, 1856),
        "backbone.layers.1.mixer.shared_experts.up_proj": (3712, 2688),
        "backbone.layers.1.mixer.shared_experts.down_proj": (2688, 3712),
        "backbone.norm_f.weight": (2688,),
        "lm_head": (131072, 2688),
    }
    assert {name: found[name].shape for name in expected} == expected
    per_layer = 1 + 2 + 2 * 128 + 2, 9, 5  # moe, mamba, attention
    assert len(found) == 23 * per_layer[0] + 23 * per_layer[1] + 6 * per_layer[2] + 3


def test_latent_experts_read_the_latent_width_and_the_shared_expert_the_hidden_one() -> None:
    found = modules(public("super-120b-a12b"))
    mixer = "backbone.layers.1.mixer"
    assert found[f"{mixer}.fc1_latent_proj"].shape == (1024, 4096)
    assert found[f"{mixer}.fc2_latent_proj"].shape == (4096, 1024)
    assert found[f"{mixer}.experts.511.up_proj"].shape == (2688, 1024)
    assert found[f"{mixer}.experts.511.down_proj"].shape == (1024, 2688)
    assert found[f"{mixer}.shared_experts.up_proj"].shape == (5376, 4096)


def test_optional_parts() -> None:
    plain = modules(tiny("M*-E"))
    without = modules(tiny("M*-E", use_conv_bias=False, n_shared_experts=0, tie_word_embeddings=True))
    assert plain.keys() - without.keys() == {
        "backbone.layers.0.mixer.conv1d.bias",
        "backbone.layers.3.mixer.shared_experts.up_proj",
        "backbone.layers.3.mixer.shared_experts.down_proj",
        "lm_head",
    }
    assert without.keys() < plain.keys()
    two_shared = modules(tiny("E", n_shared_experts=2))
    assert two_shared["backbone.layers.0.mixer.shared_experts.up_proj"].shape == (128, 64)


def test_each_dense_layer_has_its_own_size() -> None:
    found = modules(tiny("-M-", intermediate_size=[128, 256]))
    assert found["backbone.layers.0.mixer.up_proj"].shape == (128, 64)
    assert found["backbone.layers.2.mixer.down_proj"].shape == (64, 256)


def test_what_may_never_be_quantised() -> None:
    found = modules(tiny("M*-E", moe_latent_size=32)).values()
    fixed = {module.name.rpartition(".")[2] for module in found if not module.is_quantizable}
    assert fixed == {"embeddings", "weight", "bias", "A_log", "D", "dt_bias", "gate", "e_score_correction_bias"}
    assert {m.role for m in found if m.is_quantizable} == set(Role) - {Role.EMBEDDING, Role.ROUTER, Role.SMALL}
    assert {m.name.rpartition(".")[2] for m in found if m.is_widened} == {"A_log", "D", "dt_bias"}


def test_canonical_names() -> None:
    assert canonical("model.layers.0.norm.weight") == "backbone.layers.0.norm.weight"
    assert canonical("backbone.norm_f.weight") == "backbone.norm_f.weight"
    assert canonical("lm_head.weight") == "lm_head.weight"
    assert canonical("mtp.layers.0.norm.weight") == "mtp.layers.0.norm.weight"
