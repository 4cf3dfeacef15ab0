"""The plan against the public exports at their true geometry, and at a tiny one."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from hemiola.config.model import NemotronHConfig
from hemiola.errors import CheckpointError, ConfigError
from hemiola.formats.checkpoint import Checkpoint
from hemiola.formats.declaration import Algorithm, read_declaration
from hemiola.formats.safetensors import ITEM_BYTES
from hemiola.quantize.plan import QuantPlan, StoredTensor
from tests.support.skeleton import write_lightning, write_nano_nvfp4
from tests.support.variants import public, tiny


def planned(plan: QuantPlan) -> set[StoredTensor]:
    return {tensor for name in plan.modules for tensor in plan.tensors(name)}


@pytest.mark.parametrize(
    ("scheme", "write", "count"), [("lightning", write_lightning, 18_487 - 270), ("nvfp4", write_nano_nvfp4, 24_147)]
)
def test_names_dtypes_and_shapes_of_the_public_exports(
    tmp_path: Path, scheme: str, write: Callable[[Path], None], count: int
) -> None:
    write(tmp_path / "skeleton")
    headers = Checkpoint.open(tmp_path / "skeleton").headers.values()
    exported = {StoredTensor(h.name, h.dtype, h.shape) for h in headers if not h.name.startswith("mtp.")}
    plan = QuantPlan.build(NemotronHConfig.from_folder(tmp_path / "skeleton"), scheme)
    assert planned(plan) == exported
    assert len(exported) == count


def test_bytes_of_the_public_fp8_export() -> None:
    """The published figure, with the routers' correction biases, which it leaves out."""
    plan = QuantPlan.build(NemotronHConfig.from_dict(public("nano-3-30b-a3b")), "fp8")
    scalars = {tensor for tensor in planned(plan) if tensor.shape == ()}
    num_bytes = sum(math.prod(t.shape) * ITEM_BYTES[t.dtype] for t in planned(plan) - scalars)
    assert num_bytes == 32_679_889_792 + 23 * 128 * 4


@pytest.mark.parametrize(
    ("scheme", "mamba", "before_attention", "mlp", "head"),
    [
        ("fp8", Algorithm.FP8, Algorithm.PLAIN, Algorithm.FP8, Algorithm.PLAIN),
        ("nvfp4", Algorithm.NVFP4, Algorithm.PLAIN, Algorithm.NVFP4, Algorithm.PLAIN),
        ("lightning", Algorithm.FP8, Algorithm.FP8, Algorithm.W4A16_NVFP4, Algorithm.W4A16_NVFP4),
    ],
)
def test_which_module_gets_what(
    scheme: str, mamba: Algorithm, before_attention: Algorithm, mlp: Algorithm, head: Algorithm
) -> None:
    config = NemotronHConfig.from_dict(tiny("MEM*-ME*", moe_latent_size=32))
    plan, prefix = QuantPlan.build(config, scheme), "backbone.layers"
    expected = {
        **{f"{prefix}.{i}.mixer.{p}_proj": mamba for i in (0, 5) for p in ("in", "out")},
        **{f"{prefix}.2.mixer.{p}_proj": before_attention for p in ("in", "out")},
        **{f"{prefix}.4.mixer.{p}_proj": mlp for p in ("up", "down")},
        **{f"{prefix}.{i}.mixer.shared_experts.{p}_proj": mlp for i in (1, 6) for p in ("up", "down")},
        **{f"{prefix}.{i}.mixer.experts.{e}.{p}_proj": mlp for i in (1, 6) for e in range(8) for p in ("up", "down")},
        "lm_head": head,
    }
    assert {name: a for name, a in plan.algorithms.items() if expected.get(name, Algorithm.PLAIN) is not a} == {}
    assert {f"{prefix}.1.mixer.fc1_latent_proj", f"{prefix}.1.mixer.gate", "backbone.embeddings"} < set(plan.algorithms)


@pytest.mark.parametrize("scheme", ["fp8", "nvfp4"])
def test_a_single_scheme_is_declared_by_its_exclusions(scheme: str) -> None:
    document = QuantPlan.build(NemotronHConfig.from_dict(tiny("MEM*")), scheme).declaration(has_mtp=True)
    quantization = document["quantization"]
    assert quantization["quant_algo"] == scheme.upper()
    assert quantization["kv_cache_quant_algo"] == "FP8"
    assert quantization.get("group_size") == {"fp8": None, "nvfp4": 16}[scheme]
    assert quantization["exclude_modules"] == [
        "backbone.layers.0.mixer.conv1d",
        "backbone.layers.1.mixer.gate",
        "backbone.layers.2.mixer.conv1d",
        "backbone.layers.2.mixer.in_proj",
        "backbone.layers.2.mixer.out_proj",
        *(f"backbone.layers.3.mixer.{p}_proj" for p in "koqv"),
        "lm_head",
        "mtp*",
    ]


def test_lightning_declares_each_module_by_name(tmp_path: Path) -> None:
    plan = QuantPlan.build(NemotronHConfig.from_dict(tiny("M*E")), "lightning")
    block = plan.declaration(has_mtp=False)
    assert (block["quant_method"], block["quant_algo"]) == ("modelopt", "MIXED_PRECISION")
    assert block["kv_cache_scheme"] == {"dynamic": False, "num_bits": 8, "type": "float"}
    assert block["quantized_layers"]["backbone.layers.0.mixer.in_proj"] == {"quant_algo": "FP8"}
    assert block["quantized_layers"]["lm_head"] == {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    assert set(block["quantized_layers"]) == {module.name for module in plan.quantized()}
    assert "mtp*" not in block["ignore"]
    assert read_declaration(tmp_path, block).kv_cache == "fp8"


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"unknown scheme; found 'int4'; expected fp8, nvfp4, lightning"):
        QuantPlan.build(NemotronHConfig.from_dict(tiny("M")), "int4")
    config = NemotronHConfig.from_dict(tiny("ME-", moe_intermediate_size=24, intermediate_size=136))
    for scheme in ("nvfp4", "lightning"):
        with pytest.raises(CheckpointError, match=r"no multiple of 16, as NVFP4 needs \(9\)") as error:
            QuantPlan.build(config, scheme)
        assert "backbone.layers.1.mixer.experts.7.down_proj has 24 inputs" in str(error.value)
        assert "backbone.layers.2.mixer.down_proj has 136 inputs" in str(error.value)
    QuantPlan.build(config, "fp8")
