"""Attention of one query token per request over the paged KV cache, split along the context.

A program takes one KV head of one request and a contiguous run of whole KV tiles. All query heads of the KV head share
its loads: they are the rows of one tensor-core tile. How many programs share a request is fixed by the shapes, so that
a captured graph serves every length; which tiles each takes follows on the device from the request's length. With more
than one split, a second kernel combines the partial results, in an order that the shapes fix; with `invariant`, that
the request's length fixes.

Lengths and the first entries of the table are read before `gdc_wait`. The launch before calls `gdc_launch_dependents`
behind its own wait or not at all, so what was launched before it has ended and is visible in the L2 cache, which these
reads go to. Hence the contract: the launch before this one has written neither lengths nor the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hemiola.kernels.launch import (
    capability,
    gdc_launch_dependents,
    gdc_wait,
    is_interpreted,
    launch_options,
    num_sms,
    uses_pdl,
)

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """block_n: KV tokens of a tile. min_tiles: a split takes at least so many. programs_per_sm: how many programs the
    shapes may ask for, per multiprocessor, before a request is split no further."""

    block_n: int = 64
    min_tiles: int = 4
    programs_per_sm: int = 2
    num_warps: int = 4
    num_stages: int = 3


DEFAULT = DecodeTiling()
HOPPER = DecodeTiling(num_stages=4)  # two programs of heads of up to HOPPER_DIM still fit a multiprocessor
HOPPER_DIM = 128
# Boundaries of the splits at fixed token counts, whatever the other rows and the width of the table.
INVARIANT_SPLIT_TOKENS = 1024


class CombineTile(NamedTuple):
    """What a program of the combination loads at once: so many splits, of so many heads and dimensions."""

    splits: int
    heads: int
    dims: int

    @property
    def num_warps(self) -> int:
        """As many as have 32 partial values a thread."""
        return max(4, self.splits * self.heads * self.dims >> 10)


_COMBINE_INVARIANT = 32  # splits at once
_COMBINE_MOST = 256
_COMBINE_FEW = 32  # splits up to which a program takes whole heads,
_COMBINE_VALUES = 2048  # so many that it has as many partial values


def combine_tile(num_splits: int, num_heads: int, head_dim: int, *, invariant: bool = False) -> CombineTile:
    """All splits, of some heads or of a slice of one: few programs for many rows, many for few. invariant: the same
    tile whatever the number of splits, since the order of the sums follows from it."""
    dims = max(32, triton.next_power_of_2(head_dim))
    if invariant:
        return CombineTile(_COMBINE_INVARIANT, 1, dims)
    splits = min(triton.next_power_of_2(num_splits), _COMBINE_MOST)
    if splits > _COMBINE_FEW:
        return CombineTile(splits, 1, 32)
    heads = max(1, _COMBINE_VALUES // (splits * dims))
    return CombineTile(splits, min(heads, triton.next_power_of_2(num_heads)), dims)


@triton.jit
def _unpack_e4m3(pairs, ASM: tl.constexpr):
    """uint16 pairs of e4m3 codes -> the low and the high bytes' values, two bfloat16 tensors; exact, NaN kept."""
    if ASM:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 c0, c1;
            .reg .b32 h0, h1;
            .reg .b16 l0, l1, u0, u1;
            .reg .f32 fl0, fl1, fu0, fu1;
            mov.b32 {c0, c1}, $2;
            cvt.rn.f16x2.e4m3x2 h0, c0;
            cvt.rn.f16x2.e4m3x2 h1, c1;
            mov.b32 {l0, u0}, h0;
            mov.b32 {l1, u1}, h1;
            cvt.f32.f16 fl0, l0;
            cvt.f32.f16 fu0, u0;
            cvt.f32.f16 fl1, l1;
            cvt.f32.f16 fu1, u1;
            cvt.rn.bf16x2.f32 $0, fl1, fl0;
            cvt.rn.bf16x2.f32 $1, fu1, fu0;
            }
            """,
            "=r,=r,r",
            [pairs],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        low = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
        high = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    return low, high


@triton.jit
def _load_halves(
    head, places, dims, is_token, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, E4M3: tl.constexpr, ASM: tl.constexpr
):
    """Keys or values of a tile's tokens in two halves of the head, (tokens, HALF) bfloat16 each: the dimensions below
    HALF and from HALF on, or, of e4m3 codes (uint16 pairs), the even and the odd ones."""
    is_token = is_token[:, None]
    if E4M3:
        is_element = is_token if HEAD_DIM == 2 * HALF else is_token & (dims < HEAD_DIM // 2)[None, :]
        pairs = tl.load(head + places[:, None] + dims[None, :], mask=is_element, other=0)
        low, high = _unpack_e4m3(pairs, ASM)
    else:
        is_element = is_token if HEAD_DIM == 2 * HALF else is_token & (HALF + dims < HEAD_DIM)[None, :]
        low = tl.load(head + places[:, None] + dims[None, :], mask=is_token, other=0.0)
        high = tl.load(head + places[:, None] + (HALF + dims)[None, :], mask=is_element, other=0.0)
    return low, high


@triton.jit
def _tokens_per_split(seq_len, num_splits, min_tiles, BLOCK_N: tl.constexpr):
    return tl.maximum(tl.cdiv(tl.cdiv(seq_len, BLOCK_N), num_splits), min_tiles) * BLOCK_N


@triton.jit(do_not_specialize=["stride_table", "num_splits", "min_tiles"])
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    block_table,
    seq_lens,
    out,
    partial_out,
    partial_max,
    partial_sum,
    score_scale,
    v_scale,
    stride_q_row,
    stride_q_head,
    stride_block,
    stride_token,
    stride_head,
    stride_table,
    num_splits,
    min_tiles,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    E4M3: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens + row, cache_modifier=".cg")
    tokens_per_split = _tokens_per_split(seq_len, num_splits, min_tiles, BLOCK_N)
    first = split * tokens_per_split
    end = tl.minimum(seq_len, first + tokens_per_split)
    # The block numbers are fetched one tile ahead, so that the tile's own loads wait for nothing.
    tile_tokens = tl.arange(0, BLOCK_N)
    tokens = first + tile_tokens
    table = block_table + row * stride_table
    blocks = tl.load(table + tokens // BLOCK_SIZE, mask=tokens < end, other=0, cache_modifier=".cg")
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if SPLIT and first >= seq_len:
        return

    heads = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, HALF)
    low_dims = 2 * dims if E4M3 else dims
    high_dims = 2 * dims + 1 if E4M3 else dims + HALF
    is_head = heads < GROUP
    is_low = is_head[:, None] & (low_dims < HEAD_DIM)[None, :]
    is_high = is_head[:, None] & (high_dims < HEAD_DIM)[None, :]
    heads = kv_head * GROUP + heads
    query = q + row * stride_q_row + heads[:, None] * stride_q_head
    q_low = tl.load(query + low_dims[None, :], mask=is_low, other=0.0)
    q_high = tl.load(query + high_dims[None, :], mask=is_high, other=0.0)
    k_head = k_cache + kv_head.to(tl.int64) * stride_head
    v_head = v_cache + kv_head.to(tl.int64) * stride_head

    largest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    out_low = tl.zeros([BLOCK_G, HALF], tl.float32)
    out_high = tl.zeros([BLOCK_G, HALF], tl.float32)
    for start in range(first, end, BLOCK_N):
        tokens = start + tile_tokens
        is_token = tokens < end
        places = blocks.to(tl.int64) * stride_block + (tokens % BLOCK_SIZE) * stride_token
        ahead = tokens + BLOCK_N
        blocks = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
        k_low, k_high = _load_halves(k_head, places, dims, is_token, HEAD_DIM, HALF, E4M3, ASM)
        scores = tl.dot(q_low, tl.trans(k_low))
        scores = tl.dot(q_high, tl.trans(k_high), scores)
        scores = tl.where(is_token[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1) * score_scale)
        weights = tl.exp2(tl.fma(scores, score_scale, -new_largest[:, None]))
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weights, 1)
        weights = weights.to(tl.bfloat16)
        v_low, v_high = _load_halves(v_head, places, dims, is_token, HEAD_DIM, HALF, E4M3, ASM)
        out_low = tl.dot(weights, v_low, out_low * shrink[:, None])
        out_high = tl.dot(weights, v_high, out_high * shrink[:, None])
        largest = new_largest

    heads = row * (tl.num_programs(0) * GROUP) + heads
    if SPLIT:
        is_part = tokens_per_split < seq_len
        part = heads * num_splits + split
        tl.store(partial_max + part, largest, mask=is_head & is_part)
        tl.store(partial_sum + part, total, mask=is_head & is_part)
        places = partial_out + part[:, None] * HEAD_DIM
        tl.store(places + low_dims[None, :], out_low, mask=is_low & is_part)
        tl.store(places + high_dims[None, :], out_high, mask=is_high & is_part)
        is_low = is_low & (tokens_per_split >= seq_len)
        is_high = is_high & (tokens_per_split >= seq_len)
    places = out + heads[:, None] * HEAD_DIM
    out_low = tl.where(seq_len > 0, out_low / total[:, None] * v_scale, 0.0)
    out_high = tl.where(seq_len > 0, out_high / total[:, None] * v_scale, 0.0)
    tl.store(places + low_dims[None, :], out_low.to(tl.bfloat16), mask=is_low)
    tl.store(places + high_dims[None, :], out_high.to(tl.bfloat16), mask=is_high)


@triton.jit(do_not_specialize=["num_heads", "num_splits", "min_tiles"])
def _combine_kernel(
    partial_out,
    partial_max,
    partial_sum,
    seq_lens,
    out,
    v_scale,
    num_heads,
    num_splits,
    min_tiles,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    seq_len = tl.load(seq_lens + row, cache_modifier=".cg")
    tokens_per_split = _tokens_per_split(seq_len, num_splits, min_tiles, BLOCK_N)
    live = tl.cdiv(seq_len, tokens_per_split)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if live == 1:  # it has written the result itself
        return
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_head = heads < num_heads
    is_dim = dims < HEAD_DIM
    heads = row * num_heads + heads
    # From the first split's largest on, every scaling is finite; without any split the sums stay zero.
    largest = tl.load(partial_max + heads * num_splits, mask=is_head & (live > 0), other=0.0)
    total = tl.zeros([BLOCK_H], tl.float32)
    mixed = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for start in range(0, live, BLOCK_S):
        splits = start + tl.arange(0, BLOCK_S)
        is_part = (splits < live)[:, None] & is_head[None, :]
        part = heads[None, :] * num_splits + splits[:, None]
        maxima = tl.load(partial_max + part, mask=is_part, other=float("-inf"))
        sums = tl.load(partial_sum + part, mask=is_part, other=0.0)
        parts = tl.load(
            partial_out + part[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=is_part[:, :, None] & is_dim[None, None, :],
            other=0.0,
        )
        new_largest = tl.maximum(largest, tl.max(maxima, 0))
        shares = tl.exp2(maxima - new_largest[None, :])
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(sums * shares, 0)
        mixed = mixed * shrink[:, None] + tl.sum(parts * shares[:, :, None], 0)
        largest = new_largest
    mixed = tl.where(seq_len > 0, mixed / total[:, None] * v_scale, 0.0)
    places = out + heads[:, None] * HEAD_DIM + dims[None, :]
    tl.store(places, mixed.to(tl.bfloat16), mask=is_head[:, None] & is_dim[None, :])


def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    k_scale: float,
    v_scale: float,
    *,
    invariant: bool = False,
    tiling: DecodeTiling | None = None,
) -> torch.Tensor:
    """q: (R, Hq, D) bfloat16, unit stride along D. k_cache, v_cache: (blocks, block_size, Hkv, D) bfloat16 or e4m3, of
    equal strides, unit along D; k_scale and v_scale multiply an e4m3 cache and are ignored otherwise. block_table: (R,
    max_blocks) int32. seq_lens: (R,) int32; 0 gives zeros. Returns (R, Hq, D) bfloat16, contiguous.

    invariant: a row's bits depend on the row alone. tiling: None takes the GPU's.
    """
    num_rows, num_heads, head_dim = q.shape
    tiling = tiling or (HOPPER if capability() == 90 and head_dim <= HOPPER_DIM else DEFAULT)
    block_size, kv_heads = k_cache.shape[1:3]
    assert k_cache.stride() == v_cache.stride(), "the two caches have different strides"
    assert q.stride(2) == k_cache.stride(3) == block_table.stride(1) == 1, "a last dimension is not contiguous"
    group = num_heads // kv_heads
    block_d = max(32, triton.next_power_of_2(head_dim))
    e4m3 = k_cache.dtype == torch.float8_e4m3fn
    if e4m3:
        k_cache, v_cache = k_cache.view(torch.uint16), v_cache.view(torch.uint16)
    else:
        k_scale = v_scale = 1.0
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_rows == 0:
        return out
    max_tokens = block_table.shape[1] * block_size
    if invariant:
        min_tiles = INVARIANT_SPLIT_TOKENS // tiling.block_n
        num_splits = triton.cdiv(max_tokens, INVARIANT_SPLIT_TOKENS)
    else:
        min_tiles = tiling.min_tiles
        wanted = tiling.programs_per_sm * num_sms() // (num_rows * kv_heads)
        num_splits = max(1, min(wanted, triton.cdiv(max_tokens, min_tiles * tiling.block_n)))
    split = num_splits > 1
    pdl = uses_pdl()
    partial_out = partial_max = partial_sum = out
    if split:
        partial_out = torch.empty(num_rows, num_heads, num_splits, head_dim, dtype=torch.float32, device=q.device)
        partial_max, partial_sum = torch.empty(2, num_rows, num_heads, num_splits, dtype=torch.float32, device=q.device)
    _decode_kernel[(kv_heads, num_splits, num_rows)](
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        out,
        partial_out,
        partial_max,
        partial_sum,
        scale * k_scale * LOG2_E,
        v_scale,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        block_table.stride(0),
        num_splits,
        min_tiles if split else triton.cdiv(max_tokens, tiling.block_n),
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        HALF=block_d // 2,
        BLOCK_N=tiling.block_n,
        SPLIT=split,
        E4M3=e4m3,
        ASM=not is_interpreted(),
        PDL=pdl,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **launch_options(pdl),
    )
    if split:
        tile = combine_tile(num_splits, num_heads, head_dim, invariant=invariant)
        _combine_kernel[(num_rows, triton.cdiv(num_heads, tile.heads), triton.cdiv(head_dim, tile.dims))](
            partial_out,
            partial_max,
            partial_sum,
            seq_lens,
            out,
            v_scale,
            num_heads,
            num_splits,
            min_tiles,
            HEAD_DIM=head_dim,
            BLOCK_N=tiling.block_n,
            BLOCK_S=tile.splits,
            BLOCK_H=tile.heads,
            BLOCK_D=tile.dims,
            PDL=pdl,
            num_warps=tile.num_warps,
            **launch_options(pdl),
        )
    return out
