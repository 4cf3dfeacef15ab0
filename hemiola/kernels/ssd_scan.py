"""The chunked SSD scan: the Mamba-2 recurrence for rows of any number of tokens, in three kernels.

`_steps` takes softplus of dt and its cumulative decay within each chunk. `_states` walks a row's chunks in order with
the float32 state in registers: it writes the state that each chunk starts with, rounded, and the last one to its slot.
`_outputs` computes every chunk's tokens on their own from that. Tiles depend on the model's dimensions alone and chunks
on a row's own position, so neither neighbours nor a split on the chunk grid change a bit of a row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hemiola.kernels.launch import capability, gdc_launch_dependents, gdc_wait, launch_options, uses_pdl
from hemiola.kernels.ssd_update import step_size


class Chunks(NamedTuple):
    """Where the chunks of the rows lie, all int32, in order of tokens: see PrefillLayout.

    rows, starts, ends: (chunks,), each one's row and tokens. row_first: (R + 1,). num_tokens: of all of them.
    """

    rows: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    row_first: torch.Tensor
    num_tokens: int


class ScanTiles(NamedTuple):
    """Tile sizes of the scan.

    state_columns: of N, in a program of `_states`. tokens, inner: rows and columns of the scores in one of `_outputs`,
    which loops over `heads` heads of a group; `inner` that covers a chunk computes C B once for all of them.
    *_warps, *_stages: of either kernel.
    """

    state_columns: int
    state_warps: int
    state_stages: int
    tokens: int
    inner: int
    heads: int
    output_warps: int
    output_stages: int


_LEAST = 16  # what tl.dot takes
_STATE_INNER = 128  # tokens that a product of `_states` sums over
_STEP_HEADS = 16


def _tiles_for(arch: int, block_p: int, block_n: int, chunk_size: int) -> ScanTiles:
    """By architecture and the model's dimensions: what fits registers and shared memory without spilling."""
    if arch not in (90, 100, 103):  # no products of whole warp groups
        return ScanTiles(32, 8, 2, 32, 128 if chunk_size <= 128 else 32, 8, 4, 2)
    if chunk_size > 128:
        return ScanTiles(32, 4, 2, 64, 32, 8, 8, 2)
    if block_p > 64 or block_n > 128:
        return ScanTiles(64, 4, 2, 64, 128, 8, 8, 2)
    return ScanTiles(64, 4, 3, 64, 128, 8, 4 if arch == 90 else 8, 2)


@triton.jit(do_not_specialize=["num_tokens"])
def _steps(
    dt_ptr,
    A_ptr,
    dt_bias_ptr,
    chunk_starts_ptr,
    chunk_ends_ptr,
    steps_ptr,
    decays_ptr,
    num_tokens,
    dt_stride,
    dt_low,
    dt_high,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    PDL: tl.constexpr,
):
    """steps, decays: (H, T); a decay is the inclusive sum of A dt within the chunk."""
    heads = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = heads < HEADS
    A = tl.load(A_ptr + heads, mask=mask, other=0.0)
    dt_bias = tl.load(dt_bias_ptr + heads, mask=mask, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tokens = tl.load(chunk_starts_ptr + tl.program_id(1)) + tl.arange(0, BLOCK_Q)
    mask = mask[None, :] & (tokens < tl.load(chunk_ends_ptr + tl.program_id(1)))[:, None]
    dt = tl.load(dt_ptr + tokens.to(tl.int64)[:, None] * dt_stride + heads[None, :], mask=mask, other=0.0)
    step = step_size(dt, dt_bias[None, :], dt_low, dt_high)
    out = heads.to(tl.int64)[None, :] * num_tokens + tokens[:, None]
    tl.store(steps_ptr + out, step, mask=mask)
    tl.store(decays_ptr + out, tl.cumsum(step * A[None, :], 0), mask=mask)


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["slots_ptr", "starts_ptr", "computed_ptr", "first_chunk_ptr"],
)
def _states(
    x_ptr,
    B_ptr,
    steps_ptr,
    decays_ptr,
    state_ptr,
    slots_ptr,
    starts_ptr,
    computed_ptr,
    first_chunk_ptr,
    carried_ptr,
    num_tokens,
    x_stride,
    B_stride,
    state_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """carried: (chunks, H, P, N), the state before each chunk in x's dtype."""
    row, head = tl.program_id(2), tl.program_id(1)
    p = tl.arange(0, BLOCK_P)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (p < HEAD_DIM)[:, None] & (n < STATE)[None, :]
    tile = head * (HEAD_DIM * STATE) + p[:, None] * STATE + n[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    start, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    if (slot < 0) | (start == end):
        return
    computed = tl.load(computed_ptr + row)
    first = tl.load(first_chunk_ptr + row)
    first_edge = start + CHUNK - computed % CHUNK
    num_chunks = tl.load(first_chunk_ptr + row + 1) - first
    carried_ptr += first.to(tl.int64) * (HEADS * HEAD_DIM * STATE)
    state_ptrs = state_ptr + slot * state_stride + tile
    state = tl.load(state_ptrs, mask=mask & (computed > 0), other=0.0)
    x_ptr += head * HEAD_DIM
    B_ptr += head // (HEADS // GROUPS) * STATE
    steps_ptr += head.to(tl.int64) * num_tokens
    decays_ptr += head.to(tl.int64) * num_tokens
    for chunk in range(num_chunks):
        low = tl.maximum(first_edge + (chunk - 1) * CHUNK, start)
        length = tl.minimum(first_edge + chunk * CHUNK, end) - low
        x_rows, B_rows = x_ptr + low.to(tl.int64) * x_stride, B_ptr + low.to(tl.int64) * B_stride
        steps, decays = steps_ptr + low, decays_ptr + low
        tl.store(carried_ptr + tile, state.to(carried_ptr.dtype.element_ty), mask=mask)
        carried_ptr += HEADS * HEAD_DIM * STATE
        total = tl.load(decays + length - 1)
        added = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
        for inner in tl.static_range((CHUNK + BLOCK_K - 1) // BLOCK_K):
            k = inner * BLOCK_K + tl.arange(0, BLOCK_K)
            inside = k < length
            step = tl.load(steps + k, mask=inside, other=0.0)
            decay = tl.load(decays + k, mask=inside, other=0.0)
            weight = tl.exp(tl.minimum(total - decay, 0.0)) * step
            B_tile, x_tile = k[:, None] * B_stride + n[None, :], k[:, None] * x_stride + p[None, :]
            B = tl.load(B_rows + B_tile, mask=inside[:, None] & (n < STATE)[None, :], other=0.0)
            weighted = (B.to(tl.float32) * weight[:, None]).to(B.dtype)
            x = tl.load(x_rows + x_tile, mask=inside[:, None] & (p < HEAD_DIM)[None, :], other=0.0)
            added = tl.dot(tl.trans(x), weighted, added)
        state = tl.exp(total) * state + added
    tl.debug_barrier()  # a thread may store what another one loads
    tl.store(state_ptrs, state, mask=mask)


@triton.jit
def _contribute(acc, scores, x, decay_m, decay_k, step, is_causal):
    """acc plus what tokens k contribute to tokens m. scores: (M, K), C B. x: (K, P)."""
    weighted = scores * (tl.exp(tl.minimum(decay_m[:, None] - decay_k[None, :], 0.0)) * step[None, :])
    return tl.dot(tl.where(is_causal, weighted, 0.0).to(x.dtype), x, acc)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots_ptr"])
def _outputs(
    x_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    steps_ptr,
    decays_ptr,
    carried_ptr,
    slots_ptr,
    chunk_rows_ptr,
    chunk_starts_ptr,
    chunk_ends_ptr,
    y_ptr,
    num_tokens,
    x_stride,
    B_stride,
    C_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    CHUNK: tl.constexpr,
    LOOP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program is BLOCK_M tokens of a chunk and LOOP heads of one group, whose scores C B are the same."""
    first_head = tl.program_id(1) * LOOP
    group = first_head // (HEADS // GROUPS)
    p, n = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    p_mask, n_mask = (p < HEAD_DIM)[None, :], (n < STATE)[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    chunk = tl.program_id(2)
    low = tl.load(chunk_starts_ptr + chunk)
    length = tl.load(chunk_ends_ptr + chunk) - low
    if tl.program_id(0) * BLOCK_M >= length:
        return
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_mask = (m < length)[:, None]
    low = low.to(tl.int64)
    y_ptr += (low * HEADS + first_head) * HEAD_DIM
    y_tile = m[:, None] * (HEADS * HEAD_DIM) + p[None, :]
    if tl.load(slots_ptr + tl.load(chunk_rows_ptr + chunk)) < 0:
        for head in range(LOOP):
            zeros = tl.zeros([BLOCK_M, BLOCK_P], y_ptr.dtype.element_ty)
            tl.store(y_ptr + head * HEAD_DIM + y_tile, zeros, mask=m_mask & p_mask)
        return
    x_ptr += low * x_stride + first_head * HEAD_DIM
    B_ptr += low * B_stride + group * STATE
    C_ptr += low * C_stride + group * STATE
    D_ptr += first_head
    steps_ptr += first_head.to(tl.int64) * num_tokens + low
    decays_ptr += first_head.to(tl.int64) * num_tokens + low
    carried_ptr += (chunk.to(tl.int64) * HEADS + first_head) * (HEAD_DIM * STATE)
    carried_tile = p[:, None] * STATE + n[None, :]
    C = tl.load(C_ptr + m[:, None] * C_stride + n[None, :], mask=m_mask & n_mask, other=0.0)
    if CHUNK <= BLOCK_K:
        k = tl.arange(0, BLOCK_K)
        inside = k < length
        B = tl.load(B_ptr + k[:, None] * B_stride + n[None, :], mask=inside[:, None] & n_mask, other=0.0)
        scores = tl.dot(C, tl.trans(B))
    for head in range(LOOP):
        x_head, carried_head = x_ptr + head * HEAD_DIM, carried_ptr + head * (HEAD_DIM * STATE)
        steps, decays = steps_ptr + head * num_tokens, decays_ptr + head * num_tokens
        decay_m = tl.load(decays + m, mask=m < length, other=0.0)
        carried = tl.load(carried_head + carried_tile, mask=(p < HEAD_DIM)[:, None] & n_mask, other=0.0)
        acc = tl.dot(C, tl.trans(carried)) * tl.exp(decay_m)[:, None]
        if CHUNK <= BLOCK_K:
            decay_k = tl.load(decays + k, mask=inside, other=0.0)
            step = tl.load(steps + k, mask=inside, other=0.0)
            x = tl.load(x_head + k[:, None] * x_stride + p[None, :], mask=inside[:, None] & p_mask, other=0.0)
            acc = _contribute(acc, scores, x, decay_m, decay_k, step, k[None, :] <= m[:, None])
        else:
            for first in range(0, (tl.program_id(0) + 1) * BLOCK_M, BLOCK_K):
                k = first + tl.arange(0, BLOCK_K)
                inside = k < length
                decay_k = tl.load(decays + k, mask=inside, other=0.0)
                step = tl.load(steps + k, mask=inside, other=0.0)
                B = tl.load(B_ptr + k[:, None] * B_stride + n[None, :], mask=inside[:, None] & n_mask, other=0.0)
                x = tl.load(x_head + k[:, None] * x_stride + p[None, :], mask=inside[:, None] & p_mask, other=0.0)
                scores = tl.dot(C, tl.trans(B))
                acc = _contribute(acc, scores, x, decay_m, decay_k, step, k[None, :] <= m[:, None])
        x = tl.load(x_head + m[:, None] * x_stride + p[None, :], mask=m_mask & p_mask, other=0.0)
        acc += x.to(tl.float32) * tl.load(D_ptr + head)
        tl.store(y_ptr + head * HEAD_DIM + y_tile, acc.to(y_ptr.dtype.element_ty), mask=m_mask & p_mask)


def ssd_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    ssm_state: torch.Tensor,
    state_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed: torch.Tensor,
    chunk_size: int,
    dt_limit: tuple[float, float],
    chunks: Chunks,
    tiles: ScanTiles | None = None,
) -> torch.Tensor:
    """x (T, H, P), dt (T, H), B and C (T, G, N), contiguous within a token -> y (T, H, P) in x's dtype.

    ssm_state: (slots, H, P, N) float32, contiguous within a slot, updated in place; state_indices (R,): the row's slot,
    distinct, or -1: zeros. query_start_loc (R + 1,), num_computed (R,). chunks: of these rows.
    A, D, dt_bias: (H,) float32. tiles: None takes the table's.
    """
    num_tokens, heads, head_dim = x.shape
    groups, state_size = B.shape[1:]
    num_rows, num_chunks = state_indices.shape[0], chunks.rows.shape[0]
    allocate = torch.empty if chunks.num_tokens == num_tokens else torch.zeros
    y = allocate(num_tokens, heads, head_dim, dtype=x.dtype, device=x.device)
    if not num_chunks:
        return y
    pdl = uses_pdl()
    options = launch_options(pdl)
    steps, decays = torch.empty(2, heads, num_tokens, dtype=torch.float32, device=x.device)
    carried = torch.empty(num_chunks, heads, head_dim, state_size, dtype=x.dtype, device=x.device)
    block_q, block_p, block_n = (max(triton.next_power_of_2(d), _LEAST) for d in (chunk_size, head_dim, state_size))
    tiles = tiles or _tiles_for(capability(), block_p, block_n, chunk_size)
    block_m = min(block_q, tiles.tokens)
    state_columns = min(tiles.state_columns, block_n)
    loop = math.gcd(tiles.heads, heads // groups)
    step_heads = min(triton.next_power_of_2(heads), _STEP_HEADS)
    _steps[(triton.cdiv(heads, step_heads), num_chunks)](
        dt, A, dt_bias, chunks.starts, chunks.ends, steps, decays, num_tokens, dt.stride(0), *dt_limit,
        HEADS=heads, BLOCK_H=step_heads, BLOCK_Q=block_q, PDL=pdl, num_warps=4, **options,
    )  # fmt: skip
    _states[(triton.cdiv(state_size, state_columns), heads, num_rows)](
        x, B, steps, decays, ssm_state, state_indices, query_start_loc, num_computed, chunks.row_first, carried,
        num_tokens, x.stride(0), B.stride(0), ssm_state.stride(0),
        HEADS=heads, GROUPS=groups, HEAD_DIM=head_dim, STATE=state_size, CHUNK=chunk_size,
        BLOCK_P=block_p, BLOCK_N=state_columns, BLOCK_K=min(block_q, _STATE_INNER), PDL=pdl,
        num_warps=tiles.state_warps, num_stages=tiles.state_stages, **options,
    )  # fmt: skip
    _outputs[(triton.cdiv(chunk_size, block_m), heads // loop, num_chunks)](
        x, B, C, D, steps, decays, carried, state_indices, chunks.rows, chunks.starts, chunks.ends, y,
        num_tokens, x.stride(0), B.stride(0), C.stride(0),
        HEADS=heads, GROUPS=groups, HEAD_DIM=head_dim, STATE=state_size, CHUNK=chunk_size, LOOP=loop,
        BLOCK_M=block_m, BLOCK_P=block_p, BLOCK_N=block_n,
        BLOCK_K=min(block_q, tiles.inner), PDL=pdl,
        num_warps=tiles.output_warps, num_stages=tiles.output_stages, **options,
    )  # fmt: skip
    return y
