"""The Mamba-2 recurrence for one token a row: each program reads and writes its piece of the state once.

A program is a row, a head and HEAD_ROWS of its P. The sum over the state runs within one warp and in one order whatever
HEAD_ROWS is, so a row's bits do not depend on how many rows there are.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hemiola.kernels.launch import gdc_launch_dependents, gdc_wait, launch_options, uses_pdl


class UpdateTile(NamedTuple):
    """What a program of the SSD update covers: rows of the head's P, with how many warps."""

    head_rows: int
    num_warps: int


_FEW, _MANY = UpdateTile(16, 4), UpdateTile(64, 4)
_FEW_PROGRAMS = 4096  # below, smaller programs fill the GPU better


@triton.jit
def step_size(dt, dt_bias, low, high):
    """softplus(dt + dt_bias), clamped, to float32 precision also where it is tiny.

    softplus(x) = max(x, 0) + log1p(t) with t = exp(-|x|); log1p(t) = 2 atanh(s), s = t / (2 + t) <= 1/3, as a series.
    """
    x = dt.to(tl.float32) + dt_bias
    t = tl.exp(-tl.abs(x))
    s = t / (2.0 + t)
    q = s * s
    series = 1.0 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q * (1 / 13 + q * (1 / 15)))))))
    step = tl.maximum(x, 0.0) + 2.0 * s * series
    return tl.minimum(tl.maximum(step, low, tl.PropagateNan.ALL), high, tl.PropagateNan.ALL)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _ssd_update(
    x_ptr,
    dt_ptr,
    A_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    dt_bias_ptr,
    state_ptr,
    slots_ptr,
    y_ptr,
    x_stride,
    dt_stride,
    B_stride,
    C_stride,
    state_stride,
    dt_low,
    dt_high,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    group = head // (HEADS // GROUPS)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    A, D, dt_bias = tl.load(A_ptr + head), tl.load(D_ptr + head), tl.load(dt_bias_ptr + head)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    y = y_ptr + (row * HEADS + head) * HEAD_DIM + p
    if slot < 0:
        tl.store(y, tl.zeros([BLOCK_P], y_ptr.dtype.element_ty), mask=p < HEAD_DIM)
    else:
        state_ptrs = state_ptr + slot * state_stride + head * (HEAD_DIM * STATE) + p[:, None] * STATE + n[None, :]
        mask = (p < HEAD_DIM)[:, None] & (n < STATE)[None, :]
        state = tl.load(state_ptrs, mask=mask, other=0.0)
        x = tl.load(x_ptr + row * x_stride + head * HEAD_DIM + p, mask=p < HEAD_DIM, other=0.0).to(tl.float32)
        B = tl.load(B_ptr + row * B_stride + group * STATE + n, mask=n < STATE, other=0.0).to(tl.float32)
        C = tl.load(C_ptr + row * C_stride + group * STATE + n, mask=n < STATE, other=0.0).to(tl.float32)
        dt = step_size(tl.load(dt_ptr + row * dt_stride + head), dt_bias, dt_low, dt_high)
        state = state * tl.exp(A * dt) + x[:, None] * (B * dt)[None, :]
        tl.store(state_ptrs, state, mask=mask)
        out = tl.sum(state * C[None, :], 1) + x * D
        tl.store(y, out.to(y_ptr.dtype.element_ty), mask=p < HEAD_DIM)


def ssd_update(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    ssm_state: torch.Tensor,
    state_indices: torch.Tensor,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    tile: UpdateTile | None = None,
) -> torch.Tensor:
    """x (R, H, P), dt (R, H), B and C (R, G, N), contiguous within a row -> y (R, H, P) in x's dtype.

    ssm_state: (slots, H, P, N) float32, contiguous within a slot, updated in place; state_indices: (R,), the row's
    slot, distinct, or -1: zeros. A, D, dt_bias: (H,) float32. tile: None takes the table's.
    """
    num_rows, heads, head_dim = x.shape
    groups, state_size = B.shape[1:]
    y = torch.empty(num_rows, heads, head_dim, dtype=x.dtype, device=x.device)
    if not num_rows:
        return y
    tile = tile or (_FEW if num_rows * heads < _FEW_PROGRAMS else _MANY)
    block_p, pdl = min(tile.head_rows, triton.next_power_of_2(head_dim)), uses_pdl()
    _ssd_update[(triton.cdiv(head_dim, block_p), heads, num_rows)](
        x, dt, A, B, C, D, dt_bias, ssm_state, state_indices, y,
        x.stride(0), dt.stride(0), B.stride(0), C.stride(0), ssm_state.stride(0), *dt_limit,
        HEADS=heads, GROUPS=groups, HEAD_DIM=head_dim, STATE=state_size, BLOCK_P=block_p,
        BLOCK_N=triton.next_power_of_2(state_size), PDL=pdl, num_warps=tile.num_warps, **launch_options(pdl),
    )  # fmt: skip
    return y
