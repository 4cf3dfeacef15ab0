"""What a linear does to its product before it writes it: as a part of its kernel, and alone, behind a library's.

y is rounded to bfloat16; then, where asked for, its squared ReLU, rounded; then e4m3 of that over a scale, saturating.

A GPU divides zero by a call of some hundred instructions, for the whole warp, and half of what a ReLU gives is zero. So
quotients are products with the scale's inverse, corrected with their remainder (`quotient`): of a bfloat16 number the
code is that of the quotient to the nearest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hemiola.kernels.launch import gdc_launch_dependents, gdc_wait, launch_options, uses_pdl

_BLOCK = 2048


@triton.jit
def quotient(x, scale):
    """x / scale, to be converted to e4m3; a zero keeps its sign. x: float32 of bfloat16 values."""
    inverse = tl.div_rn(1.0, scale)
    # Cut off far beyond the largest code, where it could overflow; the remainder keeps infinity and NaN.
    q = tl.minimum(tl.maximum(x * inverse, -1024.0), 1024.0)
    return tl.where(x == 0.0, x, tl.fma(tl.fma(q, -scale, x), inverse, q))


@triton.jit
def finish_tile(y, out_scale, RELU_SQUARED: tl.constexpr, QUANTIZES: tl.constexpr):
    """y: any shape, float32 or bfloat16. Returns bfloat16 or e4m3."""
    y = y.to(tl.bfloat16)
    if RELU_SQUARED:
        positive = tl.where(y < 0, 0.0, y.to(tl.float32))  # NaN stays NaN
        y = (positive * positive).to(tl.bfloat16)
    if QUANTIZES:
        y = quotient(y.to(tl.float32), out_scale).to(tl.float8e4nv)
    return y


@triton.jit
def _finish(
    x_ptr,
    y_ptr,
    x_stride,
    out_scale,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    RELU_SQUARED: tl.constexpr,
    QUANTIZES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < COLUMNS
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    tl.store(y_ptr + row * COLUMNS + columns, finish_tile(x, out_scale, RELU_SQUARED, QUANTIZES), mask=mask)


def finish(x: Tensor, relu_squared: bool = False, out_scale: float | None = None) -> Tensor:
    """x: (T, columns) bfloat16, rows contiguous. Returns bfloat16, or float8_e4m3fn where out_scale is given."""
    if not relu_squared and out_scale is None:
        return x
    num_rows, columns = x.shape
    y = torch.empty(x.shape, dtype=x.dtype if out_scale is None else torch.float8_e4m3fn, device=x.device)
    if not y.numel():
        return y
    block, pdl = min(_BLOCK, triton.next_power_of_2(columns)), uses_pdl()
    _finish[(num_rows, triton.cdiv(columns, block))](
        x, y, x.stride(0), 1.0 if out_scale is None else out_scale,
        COLUMNS=columns, BLOCK=block, RELU_SQUARED=relu_squared, QUANTIZES=out_scale is not None, PDL=pdl,
        num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return y


def quantize(x: Tensor, scale: float) -> Tensor:
    """e4m3(x / scale), saturating. x: (T, columns) bfloat16, rows contiguous. Returns float8_e4m3fn."""
    return finish(x, out_scale=scale)
