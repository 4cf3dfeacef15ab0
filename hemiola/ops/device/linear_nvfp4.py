"""Linear with an NVFP4 weight on the device: `kernels.linear_nvfp4`. Contract: `ops.linear_nvfp4`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hemiola.formats.weight import Weight
from hemiola.kernels import nvfp4
from hemiola.kernels.launch import capability
from hemiola.kernels.linear_nvfp4 import linear_nvfp4
from hemiola.ops.resident import ResidentWeights
from hemiola.ops.table import register


class Packed(NamedTuple):
    """Words of codes and of block scales, as of `kernels.nvfp4.pack_words`; rows are padded to whole tiles."""

    words: Tensor
    scales: Tensor


def unsupported(
    x: Tensor, weight: Weight, dtype: torch.dtype, relu_squared: bool = False, out_scale: float | None = None
) -> str | None:
    if dtype != torch.bfloat16:
        return f"activations are {dtype}: the device arm computes in bfloat16"
    if out_scale is not None and 0 < capability() < 89:
        return "e4m3 conversions need compute capability 8.9"
    return None


def prepare(weight: Weight, resident: ResidentWeights) -> Packed:
    """The weight as the kernel reads it; built once."""
    return resident.get(weight.name, "packed", lambda: _build(weight, resident))


def run(
    x: Tensor,
    weight: Weight,
    dtype: torch.dtype,
    relu_squared: bool = False,
    out_scale: float | None = None,
    *,
    resident: ResidentWeights,
    invariant: bool,
    early: bool = False,
) -> Tensor:
    assert weight.scale is not None, f"{weight.name} has no global scale"
    words, scales = prepare(weight, resident)
    return linear_nvfp4(x, words, scales, weight.shape[0], weight.scale, relu_squared, out_scale, invariant, early)


def _build(weight: Weight, resident: ResidentWeights) -> Packed:
    assert weight.block_scale is not None, f"{weight.name} has no block scales"
    return Packed(*nvfp4.packed(resident.upload(weight.data), resident.upload(weight.block_scale)))


register(
    op="linear_nvfp4",
    arm="device",
    variant="w4a16",
    run=run,
    unsupported=unsupported,
    resident=True,
    invariant=True,
    prepare=prepare,
)
