"""Routed experts: down(relu(up(x))^2) of each token's experts, weighted and summed, for three kinds of weights.

Pair p is token p // top_k with its expert number p % top_k. Two ways lead through a layer:

- Few tokens: a program takes a pair and some rows of its expert's weights, and multiplies without tensor cores
  (`up_rows_kernel`, then `down_rows_kernel`, which also sums over a token's experts). Two launches.
- More: pairs are grouped by expert in tiles of equal size, on the device (`align_kernel`); a program takes a tile of
  pairs and rows of weights, which are the wide side of a tensor core's product (`grouped_kernel`, for up and for down);
  `combine_kernel` sums a token's pairs. Grids are bounds that follow from shapes; what lies past the end exits.

Both compute the same roundings; their sums run in different orders.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hemiola.kernels import align as aligning
from hemiola.kernels.launch import capability, gdc_launch_dependents, gdc_wait, launch_options, uses_pdl
from hemiola.kernels.nvfp4 import (
    TENSOR_MEMORY,
    code_bits,
    decode_words,
    per_word,
    scale_bits,
    scale_column,
    scale_row,
    word_column,
    word_row,
)

BF16, FP8, NVFP4 = 0, 1, 2
_BF16, _FP8, _NVFP4 = tl.constexpr(BF16), tl.constexpr(FP8), tl.constexpr(NVFP4)
_LIFT = tl.constexpr(2.0**64)


class ExpertWeights(NamedTuple):
    """One projection of all experts, as kernels read it.

    codes: BF16 (E, out, in) bfloat16; FP8 (E, out, in) float8_e4m3fn; NVFP4 (E, out, words) int32 (`nvfp4`).
    block_scales: NVFP4 (E, out, words / 8) int32, else None.
    scale: (E,) float32, multiplies the accumulator: FP8 with the input's scale, NVFP4 with `REMAINDER`; BF16 None.
    input_scale: FP8 (E,) float32, else None.
    """

    codes: Tensor
    block_scales: Tensor | None
    scale: Tensor | None
    input_scale: Tensor | None

    @property
    def scheme(self) -> int:
        return NVFP4 if self.block_scales is not None else BF16 if self.scale is None else FP8


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Tile of the kernels for few tokens: rows of weights, and columns (NVFP4: words)."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class GroupTiles:
    """Tile of the grouped kernel: rows of weights, pairs, and columns (NVFP4: words, eight columns each)."""

    rows: int
    pairs: int
    columns: int
    num_warps: int
    num_stages: int


# ---------------------------------------------------------------------------------------------- few tokens


@triton.jit
def quantise(x, scale):
    """float32 to e4m3 codes of x / scale, saturating; NaN stays."""
    q = tl.div_rn(x, scale)
    q = tl.where(q > 448.0, 448.0, tl.where(q < -448.0, -448.0, q))
    return q.to(tl.float8e4nv)


@triton.jit
def _relu_squared(x):
    """Of float32 that is rounded to bfloat16 first; the result rounded, too."""
    x = x.to(tl.bfloat16).to(tl.float32)
    x = tl.where(x < 0, 0.0, x)
    return (x * x).to(tl.bfloat16)


@triton.jit
def _row_products(
    x, codes, block_scales, input_scale, row, num_columns, row_size,
    SCHEME: tl.constexpr, QUANTISE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One vector x times rows `row` (ROWS,) of one expert's weights: (ROWS,) float32, without the expert's scale.

    QUANTISE: x is bfloat16 and is quantised with input_scale; otherwise it is in the form that the product takes.
    """
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, row_size, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        is_column = column[None, :] < row_size
        if SCHEME == _NVFP4:
            weight = tl.load(
                codes + word_row(row, row_size)[:, None] + word_column(column)[None, :], mask=is_column, other=0
            )
            group = start // 8 + tl.arange(0, COLUMNS // 8)
            groups = row_size // 8
            scales = tl.load(
                block_scales + scale_row(row, row_size)[:, None] + scale_column(group)[None, :],
                mask=group[None, :] < groups,
                other=0,
            )
            for block in tl.static_range(4):
                first = column // 8 * 64 + block * 16 + column % 8
                # A code's float is its value times 2^-126: lifted, so that no product is subnormal.
                a = tl.load(x + first, mask=first < num_columns, other=0.0).to(tl.float32) * _LIFT
                b = tl.load(x + first + 8, mask=first + 8 < num_columns, other=0.0).to(tl.float32) * _LIFT
                part = code_bits(weight, 2 * block).to(tl.float32, bitcast=True) * a[None, :]
                part += code_bits(weight, 2 * block + 1).to(tl.float32, bitcast=True) * b[None, :]
                scale = scale_bits(scales, block).to(tl.float32, bitcast=True)
                acc += part * per_word(scale, ROWS, COLUMNS // 8)
        else:
            weight = tl.load(codes + row[:, None] * row_size + column[None, :], mask=is_column, other=0.0)
            values = tl.load(x + column, mask=column < num_columns, other=0.0)
            if QUANTISE:
                values = quantise(values.to(tl.float32), input_scale)
            acc += weight.to(tl.float32) * values.to(tl.float32)[None, :]
    total = tl.sum(acc, axis=1)
    if SCHEME == _NVFP4:
        total *= 1.0 / _LIFT
    return total


@triton.jit(do_not_specialize=["num_pairs"])
def up_rows_kernel(
    x, x_stride, ids, codes, block_scales, scale, input_scale, next_input_scale, out, num_pairs,
    num_rows: tl.constexpr, num_columns: tl.constexpr, row_size: tl.constexpr, TOP_K: tl.constexpr,
    SCHEME: tl.constexpr, QUANTISE_OUT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(ids + pair).to(tl.int64)
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    codes += expert * num_rows * row_size
    factor, own_input_scale = 1.0, 1.0
    if SCHEME == _NVFP4:
        block_scales += expert * num_rows * (row_size // 8)
    if SCHEME == _FP8:
        own_input_scale = tl.load(input_scale + expert)
    if SCHEME != _BF16:
        factor = tl.load(scale + expert)
    total = _row_products(
        x + (pair // TOP_K).to(tl.int64) * x_stride, codes, block_scales, own_input_scale,
        tl.minimum(row, num_rows - 1), num_columns, row_size, SCHEME, SCHEME == _FP8, ROWS, COLUMNS, STAGES,
    )  # fmt: skip
    hidden = _relu_squared(total * factor)
    if QUANTISE_OUT:
        hidden = quantise(hidden.to(tl.float32), tl.load(next_input_scale + expert))
    tl.store(out + pair.to(tl.int64) * num_rows + row, hidden, mask=row < num_rows)


@triton.jit
def _epilogue(routed, shared, offset, mask, routed_scale, HAS_SHARED: tl.constexpr):
    """The routed sum, float32, rounded; times the scale, rounded; plus the shared part, rounded: bfloat16."""
    routed = (routed.to(tl.bfloat16).to(tl.float32) * routed_scale).to(tl.bfloat16)
    if HAS_SHARED:
        part = tl.load(shared + offset, mask=mask, other=0.0).to(tl.float32)
        routed = (routed.to(tl.float32) + part).to(tl.bfloat16)
    return routed


@triton.jit
def down_rows_kernel(
    hidden, ids, pair_weights, codes, block_scales, scale, shared, shared_stride, routed_scale, out,
    num_rows: tl.constexpr, num_columns: tl.constexpr, row_size: tl.constexpr, TOP_K: tl.constexpr,
    SCHEME: tl.constexpr, HAS_SHARED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    is_row = row < num_rows
    safe_row = tl.minimum(row, num_rows - 1)
    routed = tl.zeros((ROWS,), tl.float32)
    for k in range(TOP_K):
        pair = token * TOP_K + k
        expert = tl.load(ids + pair).to(tl.int64)
        factor = 1.0
        scales = block_scales
        if SCHEME == _NVFP4:
            scales += expert * num_rows * (row_size // 8)
        if SCHEME != _BF16:
            factor = tl.load(scale + expert)
        total = _row_products(
            hidden + pair * num_columns, codes + expert * num_rows * row_size, scales, 1.0,
            safe_row, num_columns, row_size, SCHEME, False, ROWS, COLUMNS, STAGES,
        )  # fmt: skip
        routed += (total * factor * tl.load(pair_weights + pair)).to(tl.bfloat16).to(tl.float32)
    result = _epilogue(routed, shared, token * shared_stride + row, is_row, routed_scale, HAS_SHARED)
    tl.store(out + token * num_rows + row, result, mask=is_row)


# ------------------------------------------------------------------------------------------- grouped pairs


@triton.jit(do_not_specialize=["num_pairs"])
def align_kernel(
    ids, sorted_pairs, tile_experts, num_tiles, num_pairs,
    NUM_EXPERTS: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program e places the pairs of expert e, in their order, in the tiles after those of the experts before it."""
    expert = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, num_pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        taken = tl.load(ids + pair, mask=pair < num_pairs, other=0).to(tl.int32)
        counts += tl.histogram(taken, BINS, mask=pair < num_pairs)
    bins = tl.arange(0, BINS)
    tiles = (counts + (TILE - 1)) // TILE
    first_tile = tl.sum(tl.where(bins < expert, tiles, 0))
    own_tiles = tl.sum(tl.where(bins == expert, tiles, 0))
    own_count = tl.sum(tl.where(bins == expert, counts, 0))
    if expert == NUM_EXPERTS - 1:
        tl.store(num_tiles, first_tile + own_tiles)
    for tile in range(own_tiles):
        tl.store(tile_experts + first_tile + tile, expert)
    if own_count > 0:
        placed = 0
        for start in range(0, num_pairs, CHUNK):
            pair = start + tl.arange(0, CHUNK)
            own = (tl.load(ids + pair, mask=pair < num_pairs, other=-1).to(tl.int32) == expert).to(tl.int32)
            position = placed + tl.cumsum(own, 0) - 1
            tl.store(sorted_pairs + first_tile * TILE + position, pair, mask=own > 0)
            placed += tl.sum(own)
        rest = own_count + tl.arange(0, TILE)
        tl.store(sorted_pairs + first_tile * TILE + rest, num_pairs, mask=rest < own_tiles * TILE)


@triton.jit
def quantise_pairs_kernel(
    x, x_stride, ids, input_scale, out, num_columns, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Each pair's token, quantised with the pair's expert's input scale."""
    pair = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < num_columns
    values = tl.load(x + pair // TOP_K * x_stride + column, mask=is_column, other=0.0).to(tl.float32)
    codes = quantise(values, tl.load(input_scale + tl.load(ids + pair)))
    tl.store(out + pair * num_columns + column, codes, mask=is_column)


@triton.jit(do_not_specialize=["num_pairs"])
def grouped_kernel(
    x, x_stride, codes, block_scales, scale, next_input_scale, sorted_pairs, tile_experts, num_tiles, pair_weights, out,
    num_pairs,
    num_rows: tl.constexpr, num_columns: tl.constexpr, row_size: tl.constexpr, PAIRS_PER_X: tl.constexpr,
    SCHEME: tl.constexpr, IS_UP: tl.constexpr, QUANTISE_OUT: tl.constexpr, IS_SINGLE: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of one expert's pairs times ROWS rows of its weights.

    x: row p // PAIRS_PER_X belongs to pair p. IS_UP: relu squared, quantised with QUANTISE_OUT; otherwise weighted.
    IS_SINGLE: tile p is pair p alone, and tile_experts are the routed ids.
    """
    row_blocks: tl.constexpr = (num_rows + ROWS - 1) // ROWS
    tile = tl.program_id(0) // row_blocks
    first = tl.program_id(0) % row_blocks * ROWS
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    is_used = True if IS_SINGLE else tile < tl.load(num_tiles)
    if is_used:
        expert = tl.load(tile_experts + tile).to(tl.int64)
        if IS_SINGLE:
            pair = tl.where(tl.arange(0, PAIRS) == 0, tile, num_pairs)
        else:
            pair = tl.load(sorted_pairs + tile * PAIRS + tl.arange(0, PAIRS))
        is_pair = pair < num_pairs
        row = first + tl.arange(0, ROWS)
        # Rows and pairs past the end read others' data, and are not stored.
        safe_row = tl.minimum(row, num_rows - 1)
        weights = codes + expert * num_rows * row_size
        x_row = x + (tl.where(is_pair, pair, tile if IS_SINGLE else 0) // PAIRS_PER_X).to(tl.int64)[None, :] * x_stride
        acc = tl.zeros((ROWS, PAIRS), tl.float32)
        if SCHEME == _NVFP4:
            groups: tl.constexpr = row_size // 8
            weight_row = weights + word_row(safe_row, row_size)[:, None]
            own_scales = block_scales + expert * num_rows * groups + scale_row(safe_row, row_size)[:, None]
        else:
            weight_row = weights + (safe_row * row_size)[:, None]
        for start in tl.range(0, row_size, COLUMNS, num_stages=STAGES):
            column = start + tl.arange(0, COLUMNS)
            if SCHEME == _NVFP4:
                group = start // 8 + tl.arange(0, COLUMNS // 8)
                if row_size % COLUMNS == 0:
                    words = tl.load(weight_row + word_column(column)[None, :])
                    scales = tl.load(own_scales + scale_column(group)[None, :])
                else:
                    is_word, is_group = column[None, :] < row_size, group[None, :] < groups
                    words = tl.load(weight_row + word_column(column)[None, :], mask=is_word, other=0)
                    scales = tl.load(own_scales + scale_column(group)[None, :], mask=is_group, other=0)
                tiles = decode_words(words, per_word(scales, ROWS, COLUMNS // 8), ASM)
                for j in tl.static_range(8):
                    x_column = (column // 8 * 64 + j * 8 + column % 8)[:, None]
                    if row_size % COLUMNS == 0 and num_columns == row_size * 8:
                        values = tl.load(x_row + x_column)
                    else:
                        values = tl.load(x_row + x_column, mask=x_column < num_columns, other=0.0)
                    acc = tl.dot(tiles[j], values, acc)
            else:
                if row_size % COLUMNS == 0:
                    weight = tl.load(weight_row + column[None, :])
                    values = tl.load(x_row + column[:, None])
                else:
                    weight = tl.load(weight_row + column[None, :], mask=column[None, :] < row_size, other=0.0)
                    values = tl.load(x_row + column[:, None], mask=column[:, None] < row_size, other=0.0)
                if SCHEME == _FP8:
                    # A Hopper FP8 product keeps few bits of its sums: these are added in float32 after each tile.
                    acc = tl.dot(weight, values, acc, max_num_imprecise_acc=COLUMNS)
                else:
                    acc = tl.dot(weight, values, acc)
        if SCHEME != _BF16:
            acc *= tl.load(scale + expert)
        if IS_UP:
            result = _relu_squared(acc)
            if QUANTISE_OUT:
                result = quantise(result.to(tl.float32), tl.load(next_input_scale + expert))
        else:
            result = (acc * tl.load(pair_weights + pair, mask=is_pair, other=0.0)[None, :]).to(tl.bfloat16)
        offset = pair.to(tl.int64)[None, :] * num_rows + row[:, None]
        tl.store(out + offset, result, mask=is_pair[None, :] & (row < num_rows)[:, None])


@triton.jit
def combine_kernel(
    parts, shared, shared_stride, routed_scale, out, num_columns,
    TOP_K: tl.constexpr, HAS_SHARED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The sum of a token's pairs, in their order."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < num_columns
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    routed = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        routed += tl.load(parts + (token * TOP_K + k) * num_columns + column, mask=is_column, other=0.0).to(tl.float32)
    result = _epilogue(routed, shared, token * shared_stride + column, is_column, routed_scale, HAS_SHARED)
    tl.store(out + token * num_columns + column, result, mask=is_column)


# ------------------------------------------------------------------------------------------------ launchers

# Compute capabilities with no more than 99 KB of shared memory, where the largest tiles are buffered twice only.
SMALL_SHARED = (86, 89, 120, 121)
# By scheme. Few tokens: (up, down).
ROW_TILES = {
    NVFP4: (RowTiles(16, 128, 4, 3), RowTiles(8, 128, 2, 3)),
    FP8: (RowTiles(16, 256, 4, 3), RowTiles(8, 256, 2, 3)),
    BF16: (RowTiles(8, 256, 4, 3), RowTiles(8, 256, 4, 3)),
}
# Most tokens that take the kernels for few.
FEW_TOKENS = {NVFP4: 4, FP8: 4, BF16: 4}
# By scheme: what the same tokens take instead, every pair a tile of its own on tensor cores.
SINGLE_TILES = {FP8: GroupTiles(64, 16, 256, 4, 4)}
ALIGN_CHUNK = 2048  # pairs at a time
# By scheme: from how many pairs an expert on, the tile.
GROUP_TILES = {
    NVFP4: (
        (0, GroupTiles(64, 16, 16, 4, 4)),
        (16, GroupTiles(128, 32, 16, 4, 3)),
        (72, GroupTiles(256, 64, 16, 8, 3)),
    ),
    FP8: (
        (0, GroupTiles(128, 16, 128, 8, 4)),
        (48, GroupTiles(128, 64, 128, 4, 3)),
    ),
    BF16: ((0, GroupTiles(64, 16, 64, 4, 4)), (24, GroupTiles(64, 64, 64, 4, 4)), (96, GroupTiles(128, 128, 64, 8, 3))),
}


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: ExpertWeights,
    down: ExpertWeights,
    routed_scale: float,
    shared: Tensor | None,
    *,
    invariant: bool = False,
) -> Tensor:
    """The op `moe_experts`: x (T, in) bfloat16, ids (T, top_k) integers, weights (T, top_k) float32; (T, in) bfloat16.

    x and shared: rows may lie apart, elements not.
    """
    num_tokens, top_k = ids.shape
    if not invariant and num_tokens <= min(FEW_TOKENS[up.scheme], FEW_TOKENS[down.scheme]):
        if up.scheme == down.scheme and (single := SINGLE_TILES.get(up.scheme)):
            single = _fitting(single)
            return experts_by_group(x, ids, weights, up, down, routed_scale, shared, single, single, single=True)
        by_row = ROW_TILES[up.scheme][0], ROW_TILES[down.scheme][1]
        return experts_by_row(x, ids, weights, up, down, routed_scale, shared, *by_row)
    per_expert = 0.0 if invariant else num_tokens * top_k / len(up.codes)
    by_group = group_tiles(up.scheme, per_expert), group_tiles(down.scheme, per_expert)
    return experts_by_group(x, ids, weights, up, down, routed_scale, shared, *by_group)


def group_tiles(scheme: int, per_expert: float) -> GroupTiles:
    """The tile for so many pairs an expert."""
    if scheme == NVFP4 and capability() in TENSOR_MEMORY:
        per_expert = 0.0
    tiles = next(tiles for least, tiles in reversed(GROUP_TILES[scheme]) if per_expert >= least)
    return _fitting(tiles)


def _fitting(tiles: GroupTiles) -> GroupTiles:
    """The tile with as many stages as the GPU's shared memory has room for."""
    return replace(tiles, num_stages=2) if capability() in SMALL_SHARED else tiles


def experts_by_row(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: ExpertWeights,
    down: ExpertWeights,
    routed_scale: float,
    shared: Tensor | None,
    up_tiles: RowTiles,
    down_tiles: RowTiles,
) -> Tensor:
    """`experts` with the kernels for few tokens."""
    num_tokens, top_k = ids.shape
    num_pairs, inter, size = num_tokens * top_k, up.codes.shape[1], down.codes.shape[1]
    hidden = _empty_hidden(x, num_pairs, inter, down)
    out = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    pdl = uses_pdl()
    up_rows_kernel[triton.cdiv(inter, up_tiles.rows), num_pairs](
        x, x.stride(0), ids, up.codes, up.block_scales, up.scale, up.input_scale, down.input_scale, hidden, num_pairs,
        num_rows=inter, num_columns=x.shape[1], row_size=up.codes.shape[2], TOP_K=top_k,
        SCHEME=up.scheme, QUANTISE_OUT=down.scheme == FP8,
        ROWS=up_tiles.rows, COLUMNS=up_tiles.columns, STAGES=up_tiles.num_stages, PDL=pdl,
        num_warps=up_tiles.num_warps, **launch_options(pdl),
    )  # fmt: skip
    down_rows_kernel[triton.cdiv(size, down_tiles.rows), num_tokens](
        hidden, ids, weights, down.codes, down.block_scales, down.scale, shared, _row_stride(shared), routed_scale, out,
        num_rows=size, num_columns=inter, row_size=down.codes.shape[2], TOP_K=top_k,
        SCHEME=down.scheme, HAS_SHARED=shared is not None,
        ROWS=down_tiles.rows, COLUMNS=down_tiles.columns, STAGES=down_tiles.num_stages, PDL=pdl,
        num_warps=down_tiles.num_warps, **launch_options(pdl),
    )  # fmt: skip
    return out


def experts_by_group(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: ExpertWeights,
    down: ExpertWeights,
    routed_scale: float,
    shared: Tensor | None,
    up_tiles: GroupTiles,
    down_tiles: GroupTiles,
    *,
    single: bool = False,
) -> Tensor:
    """`experts` with tensor cores. single: every pair is a tile of its own."""
    num_tokens, top_k = ids.shape
    num_pairs, inter, size = num_tokens * top_k, up.codes.shape[1], down.codes.shape[1]
    if num_tokens == 0:
        return torch.empty(0, size, dtype=x.dtype, device=x.device)
    groups = None if single else align(ids, len(up.codes), up_tiles.pairs)
    hidden = _empty_hidden(x, num_pairs, inter, down)
    if up.scheme == FP8:
        inputs, pairs_per_x = quantise_pairs(x, ids, up), 1
    else:
        inputs, pairs_per_x = x, top_k
    grouped(inputs, pairs_per_x, up, ids, groups, up_tiles, hidden, next_input_scale=down.input_scale)
    if groups is not None and down_tiles.pairs != up_tiles.pairs:
        groups = align(ids, len(down.codes), down_tiles.pairs)
    parts = torch.empty(num_pairs, size, dtype=x.dtype, device=x.device)
    grouped(hidden, 1, down, ids, groups, down_tiles, parts, pair_weights=weights)
    return combine(parts, top_k, routed_scale, shared)


def combine(parts: Tensor, top_k: int, routed_scale: float, shared: Tensor | None) -> Tensor:
    """parts (pairs, in) bfloat16, weighted: each token's sum, scaled, and the shared part: (T, in) bfloat16."""
    num_tokens, size = len(parts) // top_k, parts.shape[1]
    out = torch.empty(num_tokens, size, dtype=parts.dtype, device=parts.device)
    pdl, block = uses_pdl(), min(1024, triton.next_power_of_2(size))
    combine_kernel[num_tokens, triton.cdiv(size, block)](
        parts, shared, _row_stride(shared), routed_scale, out, size,
        TOP_K=top_k, HAS_SHARED=shared is not None, BLOCK=block, PDL=pdl, **launch_options(pdl),
    )  # fmt: skip
    return out


class Groups(NamedTuple):
    """Pairs by expert: tiles of equal size, each of one expert.

    sorted_pairs: (tiles * tile size,) int32, a tile's pairs, or the number of pairs where there is none.
    tile_experts: (tiles,) int32. num_tiles: (1,) int32, how many are in use; what lies after them is undefined.
    """

    sorted_pairs: Tensor
    tile_experts: Tensor
    num_tiles: Tensor


def align(ids: Tensor, num_experts: int, tile: int) -> Groups:
    """Group pairs by expert, in the order of experts and, within one, of pairs. Room for any routing."""
    num_pairs = ids.numel()
    most_tiles = (num_pairs + min(num_experts, num_pairs) * (tile - 1)) // tile
    options: dict[str, Any] = {"dtype": torch.int32, "device": ids.device}
    groups = Groups(
        torch.empty(most_tiles * tile, **options), torch.empty(most_tiles, **options), torch.empty(1, **options)
    )
    if aligning.takes(ids, num_experts):
        aligning.align(ids, num_experts, tile, *groups)
        return groups
    pdl = uses_pdl()
    align_kernel[(num_experts,)](
        ids, *groups, num_pairs, NUM_EXPERTS=num_experts, BINS=max(32, triton.next_power_of_2(num_experts)), TILE=tile,
        CHUNK=min(ALIGN_CHUNK, max(128, triton.next_power_of_2(num_pairs))), PDL=pdl, **launch_options(pdl),
    )  # fmt: skip
    return groups


def quantise_pairs(x: Tensor, ids: Tensor, up: ExpertWeights) -> Tensor:
    """(pairs, in) e4m3 codes of each pair's token, with the input scale of its expert."""
    num_pairs, size = ids.numel(), x.shape[1]
    out = torch.empty(num_pairs, size, dtype=torch.float8_e4m3fn, device=x.device)
    pdl, block = uses_pdl(), min(1024, triton.next_power_of_2(size))
    quantise_pairs_kernel[num_pairs, triton.cdiv(size, block)](
        x, x.stride(0), ids, up.input_scale, out, size,
        TOP_K=ids.shape[1], BLOCK=block, PDL=pdl, **launch_options(pdl),
    )  # fmt: skip
    return out


def grouped(
    x: Tensor,
    pairs_per_x: int,
    bank: ExpertWeights,
    ids: Tensor,
    groups: Groups | None,
    tiles: GroupTiles,
    out: Tensor,
    next_input_scale: Tensor | None = None,
    pair_weights: Tensor | None = None,
) -> None:
    """One projection of every pair, into `out`. Without pair_weights: up; with them: down.

    x: row p // pairs_per_x belongs to pair p; FP8: codes. groups: None where every pair is a tile of its own.
    """
    _, rows, row_size = bank.codes.shape
    pdl = uses_pdl()
    sorted_pairs, tile_experts, num_tiles = groups or (None, ids, None)
    grouped_kernel[(tile_experts.numel() * triton.cdiv(rows, tiles.rows),)](
        x, x.stride(0), bank.codes, bank.block_scales, bank.scale, next_input_scale,
        sorted_pairs, tile_experts, num_tiles, pair_weights, out, len(out),
        num_rows=rows, num_columns=x.shape[1], row_size=row_size, PAIRS_PER_X=pairs_per_x,
        SCHEME=bank.scheme, IS_UP=pair_weights is None, QUANTISE_OUT=out.dtype == torch.float8_e4m3fn,
        IS_SINGLE=groups is None, ROWS=tiles.rows, PAIRS=tiles.pairs, COLUMNS=tiles.columns, STAGES=tiles.num_stages,
        ASM=capability() >= 80, PDL=pdl, num_warps=tiles.num_warps, **launch_options(pdl),
    )  # fmt: skip


def _empty_hidden(x: Tensor, num_pairs: int, inter: int, down: ExpertWeights) -> Tensor:
    dtype = torch.float8_e4m3fn if down.scheme == FP8 else x.dtype
    return torch.empty(num_pairs, inter, dtype=dtype, device=x.device)


def _row_stride(shared: Tensor | None) -> int:
    return 0 if shared is None else shared.stride(0)
