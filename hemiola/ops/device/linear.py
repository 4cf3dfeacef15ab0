"""Linear with a plain weight on the device, computed in bfloat16: `kernels.linear_bf16`. Contract: `ops.linear`."""

from __future__ import annotations

import torch
from torch import Tensor

from hemiola.formats.weight import Weight
from hemiola.kernels.launch import capability
from hemiola.kernels.linear_bf16 import linear_bf16
from hemiola.ops.resident import ResidentWeights
from hemiola.ops.table import register


def unsupported(
    x: Tensor, weight: Weight, dtype: torch.dtype, relu_squared: bool = False, out_scale: float | None = None
) -> str | None:
    if dtype != torch.bfloat16:
        return f"activations are {dtype}: the device arm computes in bfloat16"
    if out_scale is not None and 0 < capability() < 89:
        return "e4m3 conversions need compute capability 8.9"
    return None


def prepare(weight: Weight, resident: ResidentWeights) -> Tensor:
    """The weight, (out, in) bfloat16; built once."""
    return resident.get(weight.name, "bf16", lambda: resident.upload(weight.data).to(torch.bfloat16).contiguous())


def run(
    x: Tensor,
    weight: Weight,
    dtype: torch.dtype,
    relu_squared: bool = False,
    out_scale: float | None = None,
    *,
    resident: ResidentWeights,
    invariant: bool,
) -> Tensor:
    return linear_bf16(x, prepare(weight, resident), relu_squared, out_scale, invariant)


register(
    op="linear",
    arm="device",
    variant="bf16",
    run=run,
    unsupported=unsupported,
    resident=True,
    invariant=True,
    prepare=prepare,
)
