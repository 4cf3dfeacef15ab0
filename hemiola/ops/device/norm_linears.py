"""norm_linears on the device: `kernels.norm_linear`, for a token or two, of one FP8 weight or of plain ones.

For more, and where that cannot run, there is no variant: the ops run one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hemiola.formats.weight import Scheme, Weight
from hemiola.kernels import norm_linear as kernel
from hemiola.ops.device import linear, linear_fp8
from hemiola.ops.resident import ResidentWeights
from hemiola.ops.table import register


def unsupported(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weights: Sequence[Weight],
    dtype: torch.dtype,
) -> str | None:
    schemes = {weight.scheme for weight in weights}
    if Scheme.NVFP4 in schemes or (Scheme.FP8 in schemes and len(weights) > 1):
        return "weights are neither plain nor one of FP8"
    product = torch.float8_e4m3fn if Scheme.FP8 in schemes else torch.bfloat16
    return kernel.unsupported(x, residual, norm_weight, product)


def run(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weights: Sequence[Weight],
    dtype: torch.dtype,
    *,
    resident: ResidentWeights,
) -> tuple[tuple[Tensor, ...], Tensor]:
    if weights[0].scheme is Scheme.FP8:
        w = linear_fp8.prepare(weights[0], resident)
        y, total = kernel.norm_linear(x, residual, norm_weight, eps, w.codes, w.scale, w.input_scale)
        return (y,), total
    one = len(weights) == 1
    matrix = linear.prepare(weights[0], resident) if one else linear.prepare_joined(weights, resident)
    y, total = kernel.norm_linear(x, residual, norm_weight, eps, matrix)
    return torch.split(y, [weight.shape[0] for weight in weights], dim=1), total


register(
    op="norm_linears",
    arm="device",
    variant="cuda",
    run=run,
    unsupported=unsupported,
    resident=True,
    varies=True,
)
