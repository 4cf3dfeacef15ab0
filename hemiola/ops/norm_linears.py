"""The norm before linears of one input, and these, in one: `rms_norm`, then each linear's op of what it gives.

x, residual, norm_weight, eps: as `rms_norm` takes them. weights: (out_i, in); where all are FP8 with one input_scale,
the norm quantises with it. dtype: the activation dtype.
Returns (a tuple of (T, out_i) in dtype, one a weight, which may be views of one tensor; s, the new residual).
Numerics: as of the ops; a device gives the bits of its rms_norm to the product, whose order of summation is its own.
Source: as of the ops.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hemiola.formats.weight import Scheme, Weight
from hemiola.ops.kept import KeptForms
from hemiola.ops.linear import linear
from hemiola.ops.linear_fp8 import linear_fp8
from hemiola.ops.linear_nvfp4 import linear_nvfp4
from hemiola.ops.rms_norm import rms_norm
from hemiola.ops.table import register

_LINEAR = {Scheme.PLAIN: linear, Scheme.FP8: linear_fp8, Scheme.NVFP4: linear_nvfp4}


def norm_linears(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weights: Sequence[Weight],
    dtype: torch.dtype,
    *,
    kept: KeptForms,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    scales = {weight.input_scale if weight.scheme is Scheme.FP8 else None for weight in weights}
    y, total = rms_norm(x, residual, norm_weight, eps, scales.pop() if len(scales) == 1 else None)
    return tuple(_LINEAR[weight.scheme](y, weight, dtype, kept=kept) for weight in weights), total


register(op="norm_linears", arm="reference", variant="torch", run=norm_linears, keeps=True)
