"""Linears with plain weights on the device, computed in bfloat16: `kernels.linear_bf16`. Contract: `ops.linear`.

Several of one input are one product, with one matrix that holds their rows one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def unsupported_joined(x: Tensor, weights: Sequence[Weight], dtype: torch.dtype) -> str | None:
    return unsupported(x, weights[0], dtype)


def prepare(weight: Weight, resident: ResidentWeights) -> Tensor:
    """The weight, (out, in) bfloat16; built once."""
    return resident.get(weight.name, "bf16", lambda: resident.upload(weight.data).to(torch.bfloat16).contiguous())


def prepare_joined(weights: Sequence[Weight], resident: ResidentWeights) -> Tensor:
    """All rows, (sum of out, in) bfloat16; built once, without the weights' own forms."""
    return resident.get(", ".join(weight.name for weight in weights), "bf16", lambda: _joined(weights, resident))


def _joined(weights: Sequence[Weight], resident: ResidentWeights) -> Tensor:
    sizes = [weight.shape[0] for weight in weights]
    matrix = torch.empty(sum(sizes), weights[0].shape[1], dtype=torch.bfloat16, device=resident.device)
    for weight, rows in zip(weights, matrix.split(sizes), strict=True):
        if weight.data.dtype == torch.bfloat16:
            resident.upload(weight.data, rows)
        else:
            rows.copy_(resident.upload(weight.data))
    return matrix


def run_joined(
    x: Tensor, weights: Sequence[Weight], dtype: torch.dtype, *, resident: ResidentWeights, invariant: bool
) -> tuple[Tensor, ...]:
    y = linear_bf16(x, prepare_joined(weights, resident), invariant=invariant)
    return torch.split(y, [weight.shape[0] for weight in weights], dim=1)


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
    return linear_bf16(x, prepare(weight, resident), relu_squared, out_scale, invariant, early)


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
register(
    op="linears",
    arm="device",
    variant="bf16",
    run=run_joined,
    unsupported=unsupported_joined,
    resident=True,
    invariant=True,
    prepare=prepare_joined,
)
