"""Linear with an FP8 weight on the device: `kernels.linear_fp8`. Contract: `ops.linear_fp8`."""

from __future__ import annotations

import torch
from torch import Tensor

from hemiola.formats.weight import Weight
from hemiola.kernels.launch import capability
from hemiola.kernels.linear_fp8 import Fp8Weight, linear_fp8
from hemiola.ops.resident import ResidentWeights
from hemiola.ops.table import register


def unsupported(
    x: Tensor, weight: Weight, dtype: torch.dtype, relu_squared: bool = False, out_scale: float | None = None
) -> str | None:
    if dtype != torch.bfloat16:
        return f"activations are {dtype}: the device arm computes in bfloat16"
    if 0 < capability() < 89:
        return "FP8 products need compute capability 8.9"
    return None


def prepare(weight: Weight, resident: ResidentWeights) -> Fp8Weight:
    """The codes as they are on disk, and the scales; built once."""
    return resident.get(weight.name, "codes", lambda: _build(weight, resident))


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
    return linear_fp8(x, prepare(weight, resident), relu_squared, out_scale, invariant, early)


def _build(weight: Weight, resident: ResidentWeights) -> Fp8Weight:
    assert weight.scale is not None, f"{weight.name} has no weight scale"
    assert weight.input_scale is not None, f"{weight.name} has no input scale"
    scale = weight.input_scale * weight.scale
    on_device = torch.tensor([scale], dtype=torch.float32, device=resident.device)
    return Fp8Weight(resident.upload(weight.data).contiguous(), weight.input_scale, scale, on_device)


register(
    op="linear_fp8",
    arm="device",
    variant="e4m3",
    run=run,
    unsupported=unsupported,
    resident=True,
    invariant=True,
    prepare=prepare,
)
