"""Causal attention of many query tokens per request over the paged KV cache, in tiles as in FlashAttention.

A program takes one KV head and a tile of query rows: consecutive tokens times the query heads of the KV head, so that
grouped heads share the loads of keys and values. KV tiles begin at multiples of BLOCK_N from the request's first
token, and a tile in which a row may see nothing leaves that row's sums as they are, bit for bit: a row's result depends
neither on how its prompt was cut nor on who shares the launch.

Source of the method: Dao, "FlashAttention-2" (2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hemiola.kernels.attention_decode import LOG2_E
from hemiola.kernels.launch import capability, gdc_launch_dependents, gdc_wait, launch_options, uses_pdl


@dataclass(frozen=True, slots=True)
class PrefillTiling:
    """block_m: query rows (tokens times grouped heads) of a tile; block_n: its KV tokens."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


HOPPER = PrefillTiling(128, 64, 8, 3)
# Without wgmma the operands of the products take registers.
SMALL = PrefillTiling(128, 32, 8, 2)


@triton.jit
def _attend_tiles(
    mixed,
    total,
    largest,
    queries,
    positions,
    k_head,
    v_head,
    table,
    low,
    high,
    score_scale,
    stride_block,
    stride_token,
    dims,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Online softmax over the KV tokens [low, high), low a multiple of BLOCK_N. Not MASKED: every row sees all."""
    tile_tokens = tl.arange(0, BLOCK_N)
    is_dim = (dims < HEAD_DIM)[None, :]
    tokens = low + tile_tokens
    blocks = tl.load(table + tokens // BLOCK_SIZE, mask=tokens < high, other=0)
    for start in range(low, high, BLOCK_N):
        tokens = start + tile_tokens
        places = blocks.to(tl.int64) * stride_block + (tokens % BLOCK_SIZE) * stride_token
        ahead = tokens + BLOCK_N
        blocks = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < high, other=0)
        is_element = is_dim & (tokens < high)[:, None] if MASKED else is_dim
        keys = tl.load(k_head + places[:, None], mask=is_element, other=0.0).to(tl.bfloat16)
        scores = tl.dot(queries, tl.trans(keys))
        if MASKED:
            scores = tl.where(tokens[None, :] <= positions[:, None], scores, float("-inf"))
        # An explicit fma, so that both loops round alike.
        new_largest = tl.maximum(largest, tl.max(scores, 1) * score_scale)
        weights = tl.exp2(tl.fma(scores, score_scale, -new_largest[:, None]))
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(v_head + places[:, None], mask=is_element, other=0.0).to(tl.bfloat16)
        mixed = tl.dot(weights.to(tl.bfloat16), values, mixed * shrink[:, None])
        largest = new_largest
    return mixed, total, largest


@triton.jit(do_not_specialize=["stride_table", "num_tokens", "num_rows"])
def _prefill_kernel(
    q,
    k_cache,
    v_cache,
    block_table,
    query_start_loc,
    seq_lens,
    out,
    score_scale,
    v_scale,
    stride_q_token,
    stride_q_head,
    stride_block,
    stride_token,
    stride_head,
    stride_table,
    num_tokens,
    num_rows,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0) % KV_HEADS
    num_tiles = tl.num_programs(0) // KV_HEADS
    tile = num_tiles - 1 - tl.program_id(0) // KV_HEADS  # the longest first
    row = tl.program_id(1)

    lanes = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    lane_tokens = lanes // GROUP
    heads = kv_head * GROUP + lanes % GROUP
    is_lane = lanes < TOKENS * GROUP
    is_dim = dims < HEAD_DIM
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    if row == num_rows - 1:
        # Tokens that no row owns.
        for first in range(tl.load(query_start_loc + num_rows) + tile * TOKENS, num_tokens, num_tiles * TOKENS):
            tokens = first + lane_tokens
            places = (tokens.to(tl.int64) * (KV_HEADS * GROUP) + heads) * HEAD_DIM
            is_out = (is_lane & (tokens < num_tokens))[:, None] & is_dim[None, :]
            zeros = tl.zeros([BLOCK_M, BLOCK_D], tl.bfloat16)
            tl.store(out + places[:, None] + dims[None, :], zeros, mask=is_out)

    query_start = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1) - query_start
    if tile * TOKENS >= query_len:
        return
    seq_len = tl.load(seq_lens + row)
    lane_tokens += tile * TOKENS
    is_lane = is_lane & (lane_tokens < query_len)
    tokens = (query_start + lane_tokens).to(tl.int64)
    positions = seq_len - query_len + lane_tokens
    queries = tl.load(
        q + tokens[:, None] * stride_q_token + heads[:, None] * stride_q_head + dims[None, :],
        mask=is_lane[:, None] & is_dim[None, :],
        other=0.0,
    )
    k_head = k_cache + kv_head.to(tl.int64) * stride_head + dims[None, :]
    v_head = v_cache + kv_head.to(tl.int64) * stride_head + dims[None, :]
    table = block_table + row.to(tl.int64) * stride_table

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    first_position = seq_len - query_len + tile * TOKENS
    seen_by_all = tl.maximum(first_position + 1, 0) // BLOCK_N * BLOCK_N
    seen_by_any = tl.minimum(first_position + TOKENS, seq_len)
    mixed, total, largest = _attend_tiles(
        mixed,
        total,
        largest,
        queries,
        positions,
        k_head,
        v_head,
        table,
        0,
        seen_by_all,
        score_scale,
        stride_block,
        stride_token,
        dims,
        HEAD_DIM,
        BLOCK_SIZE,
        BLOCK_N,
        MASKED=False,
    )
    mixed, total, largest = _attend_tiles(
        mixed,
        total,
        largest,
        queries,
        positions,
        k_head,
        v_head,
        table,
        seen_by_all,
        seen_by_any,
        score_scale,
        stride_block,
        stride_token,
        dims,
        HEAD_DIM,
        BLOCK_SIZE,
        BLOCK_N,
        MASKED=True,
    )
    mixed = tl.where(seq_len > 0, mixed / total[:, None] * v_scale, 0.0)
    places = (tokens * (KV_HEADS * GROUP) + heads) * HEAD_DIM
    tl.store(
        out + places[:, None] + dims[None, :],
        mixed.to(tl.bfloat16),
        mask=is_lane[:, None] & is_dim[None, :],
    )


def attention_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    k_scale: float,
    v_scale: float,
    max_query_len: int,
    *,
    tiling: PrefillTiling | None = None,
) -> torch.Tensor:
    """q: (T, Hq, D) bfloat16, unit stride along D, requests one after the other. Caches, scales and block_table as in
    `attention_decode`. query_start_loc: (R + 1,) int32. seq_lens: (R,) int32 with this step's tokens; 0 gives zeros, as
    do tokens past the last row's. max_query_len: at least the tokens of the longest row. Returns (T, Hq, D) bfloat16,
    contiguous.
    """
    num_tokens, num_heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    assert k_cache.stride() == v_cache.stride(), "the two caches have different strides"
    assert q.stride(2) == k_cache.stride(3) == block_table.stride(1) == 1, "a last dimension is not contiguous"
    num_rows = seq_lens.shape[0]
    if max_query_len == 0 or num_rows == 0:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    if tiling is None:
        tiling = HOPPER if capability() in {90, 100} else SMALL
    if k_cache.dtype != torch.float8_e4m3fn:
        k_scale = v_scale = 1.0
    group = num_heads // kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_tiles = triton.cdiv(max_query_len, tiling.block_m // group)
    pdl = uses_pdl()
    _prefill_kernel[(num_tiles * kv_heads, num_rows)](
        q,
        k_cache,
        v_cache,
        block_table,
        query_start_loc,
        seq_lens,
        out,
        scale * k_scale * LOG2_E,
        v_scale,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        block_table.stride(0),
        num_tokens,
        num_rows,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        PDL=pdl,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **launch_options(pdl),
    )
    return out
