"""Depthwise causal convolution with SiLU and its rolling state, for one token a row and for any number.

The state of a row is read before it is written: by the same program where a row is one token, and by an earlier kernel
where it is several, whose first ones need the old state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hemiola.kernels.launch import gdc_launch_dependents, gdc_wait, launch_options, uses_pdl

_CHANNELS = 256  # of a program that updates states
_TILE_TOKENS, _TILE_CHANNELS = 16, 256


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _tap(window, weight_ptr, tap, channels, mask, WIDTH: tl.constexpr):
    """A tap's product, rounded to the activation dtype; float32. window: (..., channels)."""
    weight = tl.load(weight_ptr + channels * WIDTH + tap, mask=mask, other=0.0).to(tl.float32)
    return (window.to(tl.float32) * weight).to(window.dtype).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _update(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    slots_ptr,
    out_ptr,
    x_stride,
    state_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < CHANNELS
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        total = tl.load(bias_ptr + channels, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_stride + channels, mask=mask, other=0.0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    live = slot >= 0
    state = state_ptr + slot * state_stride + channels * (WIDTH - 1)
    window = ()
    for tap in tl.static_range(WIDTH - 1):
        window = window + (tl.load(state + tap, mask=mask & live, other=0.0),)  # noqa: RUF005
    window = window + (x,)  # noqa: RUF005
    for tap in tl.static_range(WIDTH):
        total += _tap(window[tap], weight_ptr, tap, channels, mask, WIDTH)
    out = tl.where(live, _silu(total), 0.0)
    tl.store(out_ptr + row * CHANNELS + channels, out.to(x.dtype), mask=mask)
    tl.debug_barrier()  # a thread may store what another one loads
    for tap in tl.static_range(WIDTH - 1):
        tl.store(state + tap, window[tap + 1], mask=mask & live)


def causal_conv1d_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    state_indices: torch.Tensor,
) -> torch.Tensor:
    """One token a row: x (R, Dc) with contiguous rows -> (R, Dc); conv_state (slots, Dc, K-1) moves on in place.

    weight (Dc, K) and bias (Dc,) contiguous, K at least 2. state_indices (R,): the row's slot, distinct, or -1: zeros.
    """
    num_rows, num_channels = x.shape
    out = torch.empty(num_rows, num_channels, dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    pdl = uses_pdl()
    _update[(triton.cdiv(num_channels, _CHANNELS), num_rows)](
        x, weight, bias, conv_state, state_indices, out, x.stride(0), conv_state.stride(0),
        CHANNELS=num_channels, WIDTH=weight.shape[1], HAS_BIAS=bias is not None, BLOCK=_CHANNELS, PDL=pdl,
        num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=["num_tokens", "num_owned"],
    do_not_specialize_on_alignment=["slots_ptr", "starts_ptr", "has_initial_ptr", "token_rows_ptr"],
)
def _varlen(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    slots_ptr,
    starts_ptr,
    has_initial_ptr,
    token_rows_ptr,
    out_ptr,
    num_tokens,
    num_owned,
    x_stride,
    state_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < CHANNELS
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    owned = tokens < num_owned
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + channels, mask=mask, other=0.0).to(tl.float32)[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rows = tl.load(token_rows_ptr + tokens, mask=owned, other=0)
    slots = tl.load(slots_ptr + rows, mask=owned, other=-1).to(tl.int64)
    position = tokens - tl.load(starts_ptr + rows)  # within the row
    remembers = owned & (slots >= 0) & tl.load(has_initial_ptr + rows, mask=owned, other=0).to(tl.int1)
    reaches_back = tl.max(((position < WIDTH - 1) & remembers).to(tl.int32), 0)
    x = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + channels[None, :]
    state = state_ptr + slots[:, None] * state_stride + channels[None, :] * (WIDTH - 1)
    for tap in tl.static_range(WIDTH):
        back = WIDTH - 1 - tap
        inside = owned & (position >= back)
        window = tl.load(x - back * x_stride, mask=inside[:, None] & mask[None, :], other=0.0)
        if back > 0:  # noqa: SIM102  (one is decided when the kernel is compiled)
            if reaches_back > 0:
                before = remembers & (position < back)
                old = tl.load(state + (position + tap)[:, None], mask=before[:, None] & mask[None, :], other=0.0)
                window = tl.where(before[:, None], old, window)
        total += _tap(window, weight_ptr, tap, channels[None, :], mask[None, :], WIDTH)
    out = tl.where((slots >= 0)[:, None], _silu(total), 0.0).to(out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + tokens.to(tl.int64)[:, None] * CHANNELS + channels[None, :]
    tl.store(out_ptrs, out, mask=(tokens < num_tokens)[:, None] & mask[None, :])


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "starts_ptr", "has_initial_ptr"])
def _keep_last(
    x_ptr,
    state_ptr,
    slots_ptr,
    starts_ptr,
    has_initial_ptr,
    x_stride,
    state_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row's last WIDTH - 1 inputs, from its tokens and, where they are fewer, from the state before."""
    row = tl.program_id(1)
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < CHANNELS
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    start, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    if (slot >= 0) & (end > start):
        remembers = tl.load(has_initial_ptr + row).to(tl.int1)
        state = state_ptr + slot * state_stride + channels * (WIDTH - 1)
        x = x_ptr + end.to(tl.int64) * x_stride + channels
        last = ()
        for tap in tl.static_range(WIDTH - 1):
            back = WIDTH - 1 - tap
            is_new = end - start >= back
            new = tl.load(x - back * x_stride, mask=mask & is_new, other=0.0)
            old = tl.load(state + tap + (end - start), mask=mask & remembers & (is_new == 0), other=0.0)
            last = last + (tl.where(is_new, new, old),)  # noqa: RUF005
        tl.debug_barrier()  # a thread may store what another one loads
        for tap in tl.static_range(WIDTH - 1):
            tl.store(state + tap, last[tap], mask=mask)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    state_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    has_initial_state: torch.Tensor,
    token_rows: torch.Tensor,
) -> torch.Tensor:
    """Rows of any number of tokens: x (T, Dc) with contiguous rows -> (T, Dc); conv_state moves on in place.

    As `causal_conv1d_update`, and: query_start_loc (R + 1,), has_initial_state (R,) bool, token_rows (at most T,): the
    row of each token. Tokens of no row and of rows whose slot is -1 give zeros.
    """
    num_tokens, num_channels = x.shape
    num_rows, width = state_indices.shape[0], weight.shape[1]
    out = torch.empty(num_tokens, num_channels, dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    pdl = uses_pdl()
    _varlen[(triton.cdiv(num_channels, _TILE_CHANNELS), triton.cdiv(num_tokens, _TILE_TOKENS))](
        x, weight, bias, conv_state, state_indices, query_start_loc, has_initial_state, token_rows, out,
        num_tokens, token_rows.shape[0], x.stride(0), conv_state.stride(0),
        CHANNELS=num_channels, WIDTH=width, HAS_BIAS=bias is not None, TOKENS=_TILE_TOKENS, BLOCK=_TILE_CHANNELS,
        PDL=pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    _keep_last[(triton.cdiv(num_channels, _CHANNELS), num_rows)](
        x, conv_state, state_indices, query_start_loc, has_initial_state, x.stride(0), conv_state.stride(0),
        CHANNELS=num_channels, WIDTH=width, BLOCK=_CHANNELS, PDL=pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return out
