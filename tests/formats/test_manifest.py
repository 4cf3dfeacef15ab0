"""Manifest: values come out as they are stored, bit for bit, and no scale is believed that cannot be one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hemiola.config.model import NemotronHConfig
from hemiola.errors import CheckpointError
from hemiola.formats.checkpoint import Checkpoint
from hemiola.formats.manifest import Manifest
from hemiola.formats.quant import nvfp4
from hemiola.formats.weight import Scheme
from tests.support.damage import change_tensors
from tests.support.tiny_checkpoint import write_tiny_checkpoint
from tests.support.variants import tiny

MIXED = {
    "backbone.layers.3.mixer.q_proj": "FP8",
    "backbone.layers.3.mixer.k_proj": "W4A16_NVFP4",
    "backbone.layers.2.mixer.out_proj": None,
}


def write(folder: Path, scheme: str = "lightning", raw: dict[str, Any] | None = None, **knobs: Any) -> Manifest:
    config = write_tiny_checkpoint(folder, raw or tiny("MEM*E-"), scheme, shards=2, **knobs)
    return Manifest.build(Checkpoint.open(folder), config)


def rebuild(folder: Path) -> Manifest:
    return Manifest.build(Checkpoint.open(folder), NemotronHConfig.from_folder(folder))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("scheme", ["f32", "bf16", "fp8", "nvfp4", "lightning"])
def test_every_value_is_the_file_s(tmp_path: Path, scheme: str) -> None:
    """No module loses bits, whatever its neighbours are stored as."""
    manifest = write(tmp_path, scheme, algorithms=MIXED)
    raw = manifest.checkpoint.tensor
    for module in manifest.modules:
        name = module.name
        if not module.is_linear:
            assert same_bits(manifest.tensor(name), raw(name))
            continue
        weight = manifest.weight(name)
        assert (weight.name, weight.shape, weight.scheme) == (name, module.shape, module.scheme)
        assert same_bits(weight.data, raw(f"{name}.weight"))
        assert weight.stored_bytes == module.stored_bytes
        if weight.scheme is Scheme.PLAIN:
            expected = raw(f"{name}.weight").float()
            assert weight.scale is weight.block_scale is weight.input_scale is None
        elif weight.scheme is Scheme.FP8:
            expected = raw(f"{name}.weight").float() * raw(f"{name}.weight_scale")
            assert weight.input_scale == float(raw(f"{name}.input_scale"))
        else:
            codes = nvfp4.VALUES[nvfp4.unpack(raw(f"{name}.weight")).long()]
            blocks = raw(f"{name}.weight_scale").float().repeat_interleave(16, dim=1)
            expected = codes * blocks * raw(f"{name}.weight_scale_2")
        assert torch.equal(weight.dense(), expected)
    schemes = {name: manifest.weight(name).scheme for name in MIXED}
    assert list(schemes.values()) == [Scheme.FP8, Scheme.NVFP4, Scheme.PLAIN]


def test_loading_twice_gives_the_same(tmp_path: Path) -> None:
    first, second = write(tmp_path), rebuild(tmp_path)
    for module in first.modules:
        if module.is_linear:
            assert torch.equal(first.weight(module.name).dense(), second.weight(module.name).dense())


@pytest.mark.parametrize(("algorithm", "suffix"), [("FP8", "weight_scale"), ("NVFP4", "weight_scale_2")])
def test_parts_of_a_projection_with_different_scales(tmp_path: Path, algorithm: str, suffix: str) -> None:
    names = [f"backbone.layers.3.mixer.{letter}_proj" for letter in "qkv"]
    write(tmp_path, "bf16", algorithms=dict.fromkeys(names, algorithm))
    scales = dict(zip(names, (0.5, 1.0, 4.0), strict=True))
    change_tensors(
        tmp_path, lambda t: t.update({f"{name}.{suffix}": torch.tensor(scale) for name, scale in scales.items()})
    )
    manifest = rebuild(tmp_path)
    x = torch.randn(7, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for name, scale in scales.items():
        weight = manifest.weight(name)
        assert weight.scale == scale
        assert torch.equal(x @ weight.dense().double().T, (x @ weight.codes().double().T) * scale)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("suffix", ["in_proj.weight_scale", "in_proj.input_scale"])
def test_a_scale_that_cannot_be_one(tmp_path: Path, bad: float, suffix: str) -> None:
    write(tmp_path)
    names = [f"backbone.layers.0.mixer.{suffix}", "backbone.layers.5.mixer.up_proj.weight_scale_2"]
    change_tensors(tmp_path, lambda tensors: tensors.update({name: torch.tensor(bad) for name in names}))
    manifest = rebuild(tmp_path)
    with pytest.raises(CheckpointError) as error:
        manifest.weight("lm_head")
    for name in names:
        assert f"{name} = {bad}" in str(error.value)


def test_a_kv_scale_that_cannot_be_one(tmp_path: Path) -> None:
    manifest = write(tmp_path, kv_scales={3: (0.5, -2.0)})
    with pytest.raises(CheckpointError, match=r"backbone.layers.3.mixer.v_proj.v_scale = -2.0"):
        manifest.kv_scales(3)


def test_names_that_are_not_there(tmp_path: Path) -> None:
    manifest = write(tmp_path, "f32", tiny("M*", tie_word_embeddings=True))
    with pytest.raises(KeyError):
        manifest.weight("lm_head")
    with pytest.raises(KeyError):
        manifest.weight("backbone.layers.0.mixer.A_log")


def test_vectors_that_are_kept_wide_count_four_bytes(tmp_path: Path) -> None:
    modules = {module.name.rpartition(".")[2]: module for module in write(tmp_path, "bf16").modules}
    for name in ("A_log", "D", "dt_bias"):
        assert (modules[name].stored_bytes, modules[name].resident_bytes) == (16, 32)
    assert modules["in_proj"].stored_bytes == modules["in_proj"].resident_bytes
