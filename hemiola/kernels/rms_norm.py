"""RMSNorm of rows, fused with the addition before it and the e4m3 quantisation behind it. One program a row.

In CUDA C++ from Hopper on, see rms_norm.cu and norm.cuh; otherwise, and for rows that cannot be read 16 bytes at a
time, in Triton.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from hemiola.kernels.cuda import CudaFunction, CudaModule, source_of
from hemiola.kernels.launch import (
    capability,
    gdc_launch_dependents,
    gdc_wait,
    is_interpreted,
    launch_options,
    uses_pdl,
)

KERNEL = "rms_norm_kernel"
_MOST_COLUMNS = 8192  # of the CUDA kernel
_COLUMNS_PER_WARP = 512  # two 16-byte vectors of bfloat16 a thread


@triton.jit
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    sum_ptr,
    x_stride,
    residual_stride,
    eps,
    out_scale,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    QUANTIZES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=mask, other=0.0)
        total = (total.to(tl.float32) + residual.to(tl.float32)).to(total.dtype)
        tl.store(sum_ptr + row * HIDDEN + columns, total, mask=mask)
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / HIDDEN + eps)
    y = (wide * scale * weight).to(total.dtype)
    if QUANTIZES:
        y = tl.div_rn(y.to(tl.float32), out_scale)
    tl.store(y_ptr + row * HIDDEN + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, s) with s = x + residual and y = s * rsqrt(mean(s^2) + eps) * weight.

    x, residual: (T, hidden) with contiguous rows; residual None means that s is x. weight: (hidden,). out_scale: y is
    float8_e4m3fn, e4m3(y / out_scale), saturating. s has x's dtype, and so has y without out_scale.
    """
    num_tokens, hidden = x.shape
    y = torch.empty(num_tokens, hidden, dtype=x.dtype if out_scale is None else torch.float8_e4m3fn, device=x.device)
    total = x if residual is None else torch.empty(num_tokens, hidden, dtype=x.dtype, device=x.device)
    if not num_tokens:
        return y, total
    if takes_cuda(x, residual, weight):
        _function(hidden, residual is not None, out_scale is not None).launch(
            (num_tokens, 1, 1),
            (32 * triton.cdiv(hidden, 256), 1, 1),
            (
                x, x.stride(0), residual, 0 if residual is None else residual.stride(0), weight, y, total, eps,
                1.0 if out_scale is None else out_scale,
            ),
            pdl=uses_pdl(),
        )  # fmt: skip
    else:
        in_triton(x, residual, weight, eps, out_scale, y, total)
    return y, total


def takes_cuda(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor) -> bool:
    """Whether rms_norm.cu is for these rows, whose bits are those of norm.cuh."""
    rows = (x,) if residual is None else (x, residual)
    return (
        not is_interpreted()
        and capability() >= 90
        and x.shape[1] % 8 == 0
        and x.shape[1] <= _MOST_COLUMNS
        and all(t.dtype == torch.bfloat16 and t.data_ptr() % 16 == 0 for t in (*rows, weight))
        and all(t.stride(0) % 8 == 0 for t in rows)
    )


@cache
def _function(hidden: int, has_residual: bool, quantises: bool) -> CudaFunction:
    options = (f"-DHIDDEN={hidden}", f"-DRESIDUAL={int(has_residual)}", f"-DQUANTISES={int(quantises)}")
    return CudaModule(source_of("norm.cuh", "rms_norm.cu"), options).function(KERNEL, "PlPlPPPff")


def in_triton(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out_scale: float | None,
    y: torch.Tensor,
    total: torch.Tensor,
) -> None:
    """Writes y and total, as of `rms_norm`."""
    num_tokens, hidden = x.shape
    block, pdl = triton.next_power_of_2(hidden), uses_pdl()
    _rms_norm[(num_tokens,)](
        x, residual, weight, y, total, x.stride(0), 0 if residual is None else residual.stride(0), eps,
        1.0 if out_scale is None else out_scale,
        HIDDEN=hidden, BLOCK=block, HAS_RESIDUAL=residual is not None, QUANTIZES=out_scale is not None, PDL=pdl,
        num_warps=min(max(block // _COLUMNS_PER_WARP, 1), 16), **launch_options(pdl),
    )  # fmt: skip
