"""The Mamba-2 mixer's RMSNorm of y * silu(z) over groups of channels. One program a row and group."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hemiola.kernels.launch import gdc_launch_dependents, gdc_wait, launch_options, uses_pdl
from hemiola.kernels.quantize import quotient

_COLUMNS_PER_WARP = 512  # two 16-byte vectors of bfloat16 a thread


@triton.jit
def _gated_rms_norm(
    y_ptr,
    z_ptr,
    weight_ptr,
    out_ptr,
    y_stride,
    z_stride,
    eps,
    out_scale,
    GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANTIZES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = (tl.program_id(0) // NUM_GROUPS).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < GROUP
    columns += tl.program_id(0) % NUM_GROUPS * GROUP
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    y = tl.load(y_ptr + row * y_stride + columns, mask=mask, other=0.0)
    z = tl.load(z_ptr + row * z_stride + columns, mask=mask, other=0.0).to(tl.float32)
    gated = z * tl.sigmoid(z) * y.to(tl.float32)
    scale = tl.rsqrt(tl.sum(gated * gated, 0) / GROUP + eps)
    normalised = (gated * scale).to(y.dtype).to(tl.float32)
    out = (normalised * weight).to(y.dtype)
    if QUANTIZES:
        out = quotient(out.to(tl.float32), out_scale)
    tl.store(out_ptr + row * (GROUP * NUM_GROUPS) + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


def gated_rms_norm(
    y: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    group_size: int,
    eps: float,
    out_scale: float | None = None,
) -> torch.Tensor:
    """v * rsqrt(mean over each group of v^2 + eps) * weight with v = y * silu(z), rounded before the weight.

    y, z: (T, Di) with contiguous rows. weight: (Di,). group_size divides Di. out_scale: the result is float8_e4m3fn,
    e4m3(result / out_scale), saturating. Returns (T, Di), in y's dtype without out_scale.
    """
    num_tokens, width = y.shape
    out = torch.empty(num_tokens, width, dtype=y.dtype if out_scale is None else torch.float8_e4m3fn, device=y.device)
    if not num_tokens:
        return out
    block, num_groups, pdl = triton.next_power_of_2(group_size), width // group_size, uses_pdl()
    _gated_rms_norm[(num_tokens * num_groups,)](
        y, z, weight, out, y.stride(0), z.stride(0), eps, 1.0 if out_scale is None else out_scale,
        GROUP=group_size, NUM_GROUPS=num_groups, BLOCK=block, QUANTIZES=out_scale is not None, PDL=pdl,
        num_warps=min(max(block // _COLUMNS_PER_WARP, 1), 16), **launch_options(pdl),
    )  # fmt: skip
    return out
