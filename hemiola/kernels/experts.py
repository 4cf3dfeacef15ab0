"""Routed experts: down(relu(up(x))^2) of each token's experts, weighted and summed, for three kinds of weights.

The shared expert, where it has the experts' scheme and is a multiple of their size, is cut into pieces as large as an
expert: the last `num_shared` experts of a bank, which every token takes. Pair p is token p // (top_k + num_shared) with
its expert number p % (top_k + num_shared), those of the routing first. Two ways lead through a layer:

- Few tokens: a program takes a pair and some rows of its expert's weights, and multiplies without tensor cores
  (`up_rows_kernel`, then `down_rows_kernel`, which also sums over a token's experts). Two launches.
- More: pairs are grouped by expert in tiles of equal size, on the device (`align_kernel`); a program takes a tile of
  pairs and rows of weights, which are the wide side of a tensor core's product (`grouped_kernel`, for up and for down);
  `combine_kernel` sums a token's pairs, or an `End` does so and goes on. Grids are bounds that follow from shapes; what
  lies past the end exits.

Both compute the same roundings; their sums run in different orders. What the pieces of the shared expert make of a
token stays float32 until they are added: together they are one product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hemiola.kernels import align as aligning
from hemiola.kernels.launch import (
    capability,
    gdc_launch_dependents,
    gdc_wait,
    is_interpreted,
    launch_options,
    uses_pdl,
)
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
from hemiola.kernels.quantize import quotient
from hemiola.kernels.tiles import tile_column, tile_row, tiled_shape, whole_rows, write_tiles

BF16, FP8, NVFP4 = 0, 1, 2
_BF16, _FP8, _NVFP4 = tl.constexpr(BF16), tl.constexpr(FP8), tl.constexpr(NVFP4)
_LIFT = tl.constexpr(2.0**64)
_COMPILED = tl.constexpr(not is_interpreted())


End = Callable[[Tensor, Tensor | None, int, float, Tensor | None], Any]
"""What takes the place of `combine`, with its arguments: the experts' op returns what it returns. Not for so few tokens
that none is needed (`FEW_TOKENS`)."""


class SharedLinears(NamedTuple):
    """The shared expert's two linears. up: launches the first, and returns what it makes. down: launches the second for
    that, and whether it is complete as soon as the kernel before lets this one begin. beside: the second can begin
    beside a kernel that it takes nothing from."""

    up: Callable[[], Tensor]
    down: Callable[[Tensor, bool], Tensor]
    beside: bool

    def part(self) -> Tensor:
        """Both, one behind the other."""
        return self.down(self.up(), False)


class ExpertWeights(NamedTuple):
    """One projection of all experts, as kernels read it.

    codes: BF16 (E, out, in) bfloat16; FP8 (E, out, in) float8_e4m3fn; NVFP4 (E, out, words) int32 (`nvfp4`). In tiles,
    so with `out` and `in` padded.
    block_scales: NVFP4 (E, out, words / 8) int32, else None.
    scale: (E,) float32, multiplies the accumulator: FP8 with the input's scale, NVFP4 with `REMAINDER`; BF16 None.
    input_scale: FP8 (E,) float32, else None.
    num_shared: how many of the E, at the end, are pieces of the shared expert.
    one_input_scale: all others have the same one.
    """

    codes: Tensor
    block_scales: Tensor | None
    scale: Tensor | None
    input_scale: Tensor | None
    num_shared: int = 0
    one_input_scale: bool = False

    @property
    def scheme(self) -> int:
        return NVFP4 if self.block_scales is not None else BF16 if self.scale is None else FP8


def empty_codes(num_experts: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Room for a bank of BF16 or FP8 weights, each to be written with `write_tiles`."""
    return torch.empty(num_experts, *tiled_shape(rows, columns, dtype), dtype=dtype, device=device)


def tiled_codes(codes: Tensor) -> Tensor:
    """A bank of BF16 or FP8 weights (E, out, in), row after row, in tiles."""
    out = empty_codes(len(codes), codes.shape[1], codes.shape[2], codes.dtype, codes.device)
    for weight, tiles in zip(codes, out, strict=True):
        write_tiles(weight, tiles)
    return out


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Tile of the kernels for few tokens: rows of weights, and columns (NVFP4: words)."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class GroupTiles:
    """Tile of the grouped kernel: rows of weights, pairs, and columns (NVFP4: words, eight columns each).

    fast: FP8 sums stay in the tensor cores, which on Hopper keep few bits of them.
    """

    rows: int
    pairs: int
    columns: int
    num_warps: int
    num_stages: int
    fast: bool = False


@triton.jit
def expert_of(ids, pair, TOP_K: tl.constexpr, NUM_SHARED: tl.constexpr, NUM_EXPERTS: tl.constexpr):
    """Each pair's expert, int64. NUM_EXPERTS: all of the bank."""
    if NUM_SHARED == 0:
        expert = tl.load(ids + pair)
    else:
        k = pair % (TOP_K + NUM_SHARED)
        expert = tl.load(ids + routed_place(pair, TOP_K, NUM_SHARED))
        expert = tl.where(k < TOP_K, expert, NUM_EXPERTS - NUM_SHARED - TOP_K + k)
    return expert.to(tl.int64)


@triton.jit
def routed_place(pair, TOP_K: tl.constexpr, NUM_SHARED: tl.constexpr):
    """Where a pair's id and weight stand in the routing; some place of its token's where it is none of the routing."""
    return pair // (TOP_K + NUM_SHARED) * TOP_K + tl.minimum(pair % (TOP_K + NUM_SHARED), TOP_K - 1)


# ---------------------------------------------------------------------------------------------- few tokens


@triton.jit
def quantise(x, scale):
    """e4m3 codes of x / scale, saturating; NaN stays. x: float32 of bfloat16 values."""
    return quotient(x, scale).to(tl.float8e4nv)


@triton.jit
def _relu_squared(x):
    """Of float32 that is rounded to bfloat16 first; the result rounded, too. NaN stays NaN."""
    if _COMPILED:
        x = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 v, zero, negative_zero;
            mov.b32 zero, 0;
            mov.b32 negative_zero, 0x80008000;
            cvt.rn.bf16x2.f32 v, $2, $1;
            max.NaN.bf16x2 v, v, zero;
            fma.rn.bf16x2 $0, v, v, negative_zero;
            }
            """,
            "=r,f,f",
            [x],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        x = x.to(tl.bfloat16).to(tl.float32)
        x = tl.where(x < 0, 0.0, x)
        x = (x * x).to(tl.bfloat16)
    return x


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
            piece: tl.constexpr = 64 if SCHEME == _FP8 else 32
            weight = tl.load(
                codes + tile_row(row, row_size, piece)[:, None] + tile_column(column, piece)[None, :],
                mask=is_column,
                other=0.0,
            )
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
    num_rows: tl.constexpr, num_columns: tl.constexpr, row_size: tl.constexpr,
    TOP_K: tl.constexpr, NUM_SHARED: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    SCHEME: tl.constexpr, QUANTISE_OUT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = expert_of(ids, pair, TOP_K, NUM_SHARED, NUM_EXPERTS)
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    codes += expert * whole_rows(num_rows) * row_size
    factor, own_input_scale = 1.0, 1.0
    if SCHEME == _NVFP4:
        block_scales += expert * num_rows * (row_size // 8)
    if SCHEME == _FP8:
        own_input_scale = tl.load(input_scale + expert)
    if SCHEME != _BF16:
        factor = tl.load(scale + expert)
    total = _row_products(
        x + (pair // (TOP_K + NUM_SHARED)).to(tl.int64) * x_stride, codes, block_scales, own_input_scale,
        tl.minimum(row, num_rows - 1), num_columns, row_size, SCHEME, SCHEME == _FP8, ROWS, COLUMNS, STAGES,
    )  # fmt: skip
    hidden = _relu_squared(total * factor)
    if QUANTISE_OUT:
        hidden = quantise(hidden.to(tl.float32), tl.load(next_input_scale + expert))
    tl.store(out + pair.to(tl.int64) * num_rows + row, hidden, mask=row < num_rows)


@triton.jit
def _epilogue(routed, shared, routed_scale, HAS_SHARED: tl.constexpr):
    """The routed sum, float32, rounded; times the scale, rounded; plus the shared part, rounded, rounded: bfloat16."""
    routed = (routed.to(tl.bfloat16).to(tl.float32) * routed_scale).to(tl.bfloat16)
    if HAS_SHARED:
        routed = (routed.to(tl.float32) + shared.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16)
    return routed


@triton.jit
def down_rows_kernel(
    hidden, ids, pair_weights, codes, block_scales, scale, shared, shared_stride, routed_scale, out,
    num_rows: tl.constexpr, num_columns: tl.constexpr, row_size: tl.constexpr,
    TOP_K: tl.constexpr, NUM_SHARED: tl.constexpr, NUM_EXPERTS: tl.constexpr,
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
    pieces = tl.zeros((ROWS,), tl.float32)
    for k in range(TOP_K + NUM_SHARED):
        pair = token * (TOP_K + NUM_SHARED) + k
        expert = expert_of(ids, pair, TOP_K, NUM_SHARED, NUM_EXPERTS)
        factor = 1.0
        scales = block_scales
        if SCHEME == _NVFP4:
            scales += expert * num_rows * (row_size // 8)
        if SCHEME != _BF16:
            factor = tl.load(scale + expert)
        total = _row_products(
            hidden + pair * num_columns, codes + expert * whole_rows(num_rows) * row_size, scales, 1.0,
            safe_row, num_columns, row_size, SCHEME, False, ROWS, COLUMNS, STAGES,
        )  # fmt: skip
        if k < TOP_K:
            weight = tl.load(pair_weights + token * TOP_K + k)
            routed += (total * factor * weight).to(tl.bfloat16).to(tl.float32)
        else:
            pieces += total * factor
    if HAS_SHARED:
        pieces = tl.load(shared + token * shared_stride + row, mask=is_row, other=0.0).to(tl.float32)
    result = _epilogue(routed, pieces, routed_scale, HAS_SHARED or NUM_SHARED > 0)
    tl.store(out + token * num_rows + row, result, mask=is_row)


# ------------------------------------------------------------------------------------------- grouped pairs


@triton.jit(do_not_specialize=["num_ids"])
def align_kernel(
    ids, sorted_pairs, tile_experts, num_tiles, num_ids,
    TOP_K: tl.constexpr, NUM_SHARED: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr, TILE: tl.constexpr, TILE_BLOCK: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program e places the pairs of expert e, in their order, in the tiles after those of the experts before it."""
    ROUTED: tl.constexpr = NUM_EXPERTS - NUM_SHARED
    num_tokens = num_ids // TOP_K
    num_pairs = num_ids + num_tokens * NUM_SHARED
    expert = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, num_ids, CHUNK):
        place = start + tl.arange(0, CHUNK)
        taken = tl.load(ids + place, mask=place < num_ids, other=0).to(tl.int32)
        counts += tl.histogram(taken, BINS, mask=place < num_ids)
    bins = tl.arange(0, BINS)
    if NUM_SHARED > 0:
        counts = tl.where((bins >= ROUTED) & (bins < NUM_EXPERTS), num_tokens, counts)
    tiles = (counts + (TILE - 1)) // TILE
    first_tile = tl.sum(tl.where(bins < expert, tiles, 0))
    own_tiles = tl.sum(tl.where(bins == expert, tiles, 0))
    own_count = tl.sum(tl.where(bins == expert, counts, 0))
    if expert == NUM_EXPERTS - 1:
        tl.store(num_tiles, first_tile + own_tiles)
    for tile in range(own_tiles):
        tl.store(tile_experts + first_tile + tile, expert)
    if own_count > 0:
        if expert < ROUTED:
            placed = 0
            for start in range(0, num_ids, CHUNK):
                place = start + tl.arange(0, CHUNK)
                own = (tl.load(ids + place, mask=place < num_ids, other=-1).to(tl.int32) == expert).to(tl.int32)
                position = placed + tl.cumsum(own, 0) - 1
                pair = place // TOP_K * (TOP_K + NUM_SHARED) + place % TOP_K
                tl.store(sorted_pairs + first_tile * TILE + position, pair, mask=own > 0)
                placed += tl.sum(own)
        else:
            for start in range(0, num_tokens, CHUNK):
                token = start + tl.arange(0, CHUNK)
                pair = token * (TOP_K + NUM_SHARED) + TOP_K + expert - ROUTED
                tl.store(sorted_pairs + first_tile * TILE + token, pair, mask=token < num_tokens)
        rest = own_count + tl.arange(0, TILE_BLOCK)
        tl.store(sorted_pairs + first_tile * TILE + rest, num_pairs, mask=rest < own_tiles * TILE)


@triton.jit
def quantise_pairs_kernel(
    x, x_stride, ids, input_scale, out, num_columns,
    TOP_K: tl.constexpr, NUM_SHARED: tl.constexpr, NUM_EXPERTS: tl.constexpr, PAIRS: tl.constexpr,
    ONE_SCALE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each pair's token, quantised with the pair's expert's input scale. A program takes PAIRS of a token; with
    ONE_SCALE, the token itself."""
    first = tl.program_id(0).to(tl.int64) * PAIRS
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < num_columns
    token = first if ONE_SCALE else first // (TOP_K + NUM_SHARED)
    values = tl.load(x + token * x_stride + column, mask=is_column, other=0.0).to(tl.float32)
    for i in tl.static_range(PAIRS):
        pair = first + i
        expert = 0 if ONE_SCALE else expert_of(ids, pair, TOP_K, NUM_SHARED, NUM_EXPERTS)
        codes = quantise(values, tl.load(input_scale + expert))
        tl.store(out + pair * num_columns + column, codes, mask=is_column)


@triton.jit(do_not_specialize=["num_pairs"])
def grouped_kernel(
    x, x_stride, codes, block_scales, scale, next_input_scale, sorted_pairs, tile_experts, num_tiles, pair_weights, out,
    pieces, num_pairs,
    num_rows: tl.constexpr, num_columns: tl.constexpr, row_size: tl.constexpr, PAIRS_PER_X: tl.constexpr,
    TOP_K: tl.constexpr, NUM_SHARED: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    SCHEME: tl.constexpr, IS_UP: tl.constexpr, QUANTISE_OUT: tl.constexpr, IS_SINGLE: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    FAST: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of one expert's pairs times ROWS rows of its weights.

    x: row p // PAIRS_PER_X belongs to pair p. IS_UP: relu squared, quantised with QUANTISE_OUT; otherwise weighted, in
    the routing's experts, and float32 in `pieces` (tokens, NUM_SHARED, rows) in those of the shared one.
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
        if IS_SINGLE:
            expert = expert_of(tile_experts, tile, TOP_K, NUM_SHARED, NUM_EXPERTS)
        else:
            expert = tl.load(tile_experts + tile).to(tl.int64)
        if IS_SINGLE:
            pair = tl.where(tl.arange(0, PAIRS) == 0, tile, num_pairs)
        else:
            pair = tl.load(sorted_pairs + tile * PAIRS + tl.arange(0, PAIRS))
        is_pair = pair < num_pairs
        row = first + tl.arange(0, ROWS)
        # Rows and pairs past the end read others' data, and are not stored.
        safe_row = tl.minimum(row, num_rows - 1)
        weights = codes + expert * whole_rows(num_rows) * row_size
        x_row = x + (tl.where(is_pair, pair, tile if IS_SINGLE else 0) // PAIRS_PER_X).to(tl.int64)[None, :] * x_stride
        acc = tl.zeros((ROWS, PAIRS), tl.float32)
        if SCHEME == _NVFP4:
            groups: tl.constexpr = row_size // 8
            weight_row = weights + word_row(safe_row, row_size)[:, None]
            own_scales = block_scales + expert * num_rows * groups + scale_row(safe_row, row_size)[:, None]
        else:
            piece: tl.constexpr = 64 if SCHEME == _FP8 else 32
            weight_row = weights + tile_row(safe_row, row_size, piece)[:, None]
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
                weight_ptr = weight_row + tile_column(column, piece)[None, :]
                if row_size % COLUMNS == 0:
                    weight = tl.load(weight_ptr)
                else:
                    weight = tl.load(weight_ptr, mask=column[None, :] < row_size, other=0.0)
                if row_size % COLUMNS == 0 and num_columns == row_size:
                    values = tl.load(x_row + column[:, None])
                else:
                    values = tl.load(x_row + column[:, None], mask=column[:, None] < num_columns, other=0.0)
                if SCHEME == _FP8 and not FAST:
                    # A Hopper FP8 product keeps few bits of its sums: these are added in float32 after each tile.
                    acc = tl.dot(weight, values, acc, max_num_imprecise_acc=COLUMNS)
                else:
                    acc = tl.dot(weight, values, acc)
        if SCHEME != _BF16:
            acc *= tl.load(scale + expert)
        is_mine = is_pair[None, :] & (row < num_rows)[:, None]
        if IS_UP:
            result = _relu_squared(acc)
            if QUANTISE_OUT:
                result = quantise(result.to(tl.float32), tl.load(next_input_scale + expert))
            tl.store(out + pair.to(tl.int64)[None, :] * num_rows + row[:, None], result, mask=is_mine)
        elif NUM_SHARED > 0:
            if expert < NUM_EXPERTS - NUM_SHARED:
                weight = tl.load(pair_weights + routed_place(pair, TOP_K, NUM_SHARED), mask=is_pair, other=0.0)
                part = (acc * weight[None, :]).to(tl.bfloat16)
                tl.store(out + pair.to(tl.int64)[None, :] * num_rows + row[:, None], part, mask=is_mine)
            else:
                place = pair // (TOP_K + NUM_SHARED) * NUM_SHARED + (expert - (NUM_EXPERTS - NUM_SHARED))
                tl.store(pieces + place[None, :] * num_rows + row[:, None], acc, mask=is_mine)
        else:
            part = (acc * tl.load(pair_weights + pair, mask=is_pair, other=0.0)[None, :]).to(tl.bfloat16)
            tl.store(out + pair.to(tl.int64)[None, :] * num_rows + row[:, None], part, mask=is_mine)


@triton.jit
def combine_kernel(
    parts, pieces, shared, shared_stride, routed_scale, out, num_columns, TOP_K: tl.constexpr, PAIRS: tl.constexpr,
    NUM_SHARED: tl.constexpr, HAS_SHARED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The sum of a token's pairs, in their order, and of the pieces of the shared expert. PAIRS: rows of parts a
    token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < num_columns
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    routed = tl.zeros((BLOCK,), tl.float32)
    part = parts + token * PAIRS * num_columns + column
    for k in tl.static_range(TOP_K):
        routed += tl.load(part + k * num_columns, mask=is_column, other=0.0).to(tl.float32)
    together = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(NUM_SHARED):
        together += tl.load(pieces + (token * NUM_SHARED + k) * num_columns + column, mask=is_column, other=0.0)
    if HAS_SHARED:
        together = tl.load(shared + token * shared_stride + column, mask=is_column, other=0.0).to(tl.float32)
    result = _epilogue(routed, together, routed_scale, HAS_SHARED or NUM_SHARED > 0)
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
QUANTISE_TOGETHER = 256  # from so many tokens on, one program quantises a token for all of its pairs
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
# On Hopper, from how many pairs an expert on, those of up and of down, of as many pairs.
HOPPER_TILES = {
    FP8: (96, GroupTiles(256, 128, 64, 8, 5, fast=True), GroupTiles(256, 128, 64, 8, 5, fast=True)),
    BF16: (96, GroupTiles(256, 128, 64, 8, 4), GroupTiles(256, 128, 64, 8, 4)),
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
    end: End | None = None,
) -> Any:
    """The op `moe_experts`: x (T, in) bfloat16, ids (T, top_k) integers, weights (T, top_k) float32; (T, in) bfloat16,
    or what `end` returns.

    x and shared: rows may lie apart, elements not. shared: what the shared expert made of the tokens, (T, in); None
    where there is none, or where its pieces are experts of the banks.
    """
    assert up.num_shared == down.num_shared, "banks with different pieces"
    assert shared is None or not up.num_shared, "the shared expert twice"
    num_tokens, top_k = ids.shape
    if not invariant and num_tokens <= min(FEW_TOKENS[up.scheme], FEW_TOKENS[down.scheme]):
        assert end is None, f"{num_tokens} tokens have no sum of their own"
        if up.scheme == down.scheme and (single := SINGLE_TILES.get(up.scheme)):
            single = _fitting(single)
            return experts_by_group(x, ids, weights, up, down, routed_scale, shared, single, single, single=True)
        by_row = ROW_TILES[up.scheme][0], ROW_TILES[down.scheme][1]
        return experts_by_row(x, ids, weights, up, down, routed_scale, shared, *by_row)
    per_expert = 0.0 if invariant else pairs_per_expert(num_tokens, top_k, up)
    by_group = group_tiles(up, per_expert), group_tiles(down, per_expert, is_down=True)
    return experts_by_group(x, ids, weights, up, down, routed_scale, shared, *by_group, end=end)


def pairs_per_expert(num_tokens: int, top_k: int, bank: ExpertWeights) -> float:
    """On average, of the routing's experts."""
    return num_tokens * top_k / (len(bank.codes) - bank.num_shared)


def group_tiles(bank: ExpertWeights, per_expert: float, is_down: bool = False) -> GroupTiles:
    """The tile for so many pairs an expert."""
    scheme = bank.scheme
    if capability() == 90 and scheme in HOPPER_TILES:
        least, up_tiles, down_tiles = HOPPER_TILES[scheme]
        if per_expert >= least:
            return down_tiles if is_down else up_tiles
    if scheme == NVFP4 and (capability() in TENSOR_MEMORY or (is_down and bank.num_shared)):
        # Eight decoded tiles have no room in tensor memory, nor beside two kinds of results in registers.
        per_expert = 0.0 if capability() in TENSOR_MEMORY else min(per_expert, 71.0)
    return _fitting(next(tiles for least, tiles in reversed(GROUP_TILES[scheme]) if per_expert >= least))


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
    num_pairs, inter, size = num_tokens * (top_k + up.num_shared), up.codes.shape[1], x.shape[1]
    hidden = _empty_hidden(x, num_pairs, inter, down)
    out = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    pdl = uses_pdl()
    up_rows_kernel[triton.cdiv(inter, up_tiles.rows), num_pairs](
        x, x.stride(0), ids, up.codes, up.block_scales, up.scale, up.input_scale, down.input_scale, hidden, num_pairs,
        num_rows=inter, num_columns=x.shape[1], row_size=up.codes.shape[2], **_counts(up, top_k),
        SCHEME=up.scheme, QUANTISE_OUT=down.scheme == FP8,
        ROWS=up_tiles.rows, COLUMNS=up_tiles.columns, STAGES=up_tiles.num_stages, PDL=pdl,
        num_warps=up_tiles.num_warps, **launch_options(pdl),
    )  # fmt: skip
    down_rows_kernel[triton.cdiv(size, down_tiles.rows), num_tokens](
        hidden, ids, weights, down.codes, down.block_scales, down.scale, shared, _row_stride(shared), routed_scale, out,
        num_rows=size, num_columns=inter, row_size=down.codes.shape[2], **_counts(down, top_k),
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
    end: End | None = None,
) -> Any:
    """`experts` with tensor cores. single: every pair is a tile of its own."""
    num_tokens, top_k = ids.shape
    pairs_per_token, inter, size = top_k + up.num_shared, up.codes.shape[1], x.shape[1]
    if num_tokens == 0:
        assert end is None, "no tokens have no sum"
        return torch.empty(0, size, dtype=x.dtype, device=x.device)
    groups = None if single else align(ids, len(up.codes), up_tiles.pairs, up.num_shared)
    hidden = _empty_hidden(x, num_tokens * pairs_per_token, inter, down)
    inputs = quantise_pairs(x, ids, up) if up.scheme == FP8 else x
    pairs_per_x = num_tokens * pairs_per_token // len(inputs)
    grouped(inputs, pairs_per_x, up, ids, groups, up_tiles, hidden, next_input_scale=down.input_scale)
    if groups is not None and down_tiles.pairs != up_tiles.pairs:
        groups = align(ids, len(down.codes), down_tiles.pairs, down.num_shared)
    parts, pieces = empty_parts(x, num_tokens, top_k, down)
    grouped(hidden, 1, down, ids, groups, down_tiles, parts, pair_weights=weights, pieces=pieces)
    return (end or combine)(parts, pieces, top_k, routed_scale, shared)


def empty_parts(x: Tensor, num_tokens: int, top_k: int, down: ExpertWeights) -> tuple[Tensor, Tensor | None]:
    """What the down projection writes: (pairs, in) bfloat16, of the routing's experts alone, and (T, num_shared, in)
    float32 of the shared one's pieces, None where there are none."""
    num_shared, size = down.num_shared, x.shape[1]
    parts = torch.empty(num_tokens * (top_k + num_shared), size, dtype=x.dtype, device=x.device)
    if not num_shared:
        return parts, None
    return parts, torch.empty(num_tokens, num_shared, size, dtype=torch.float32, device=x.device)


def combine(parts: Tensor, pieces: Tensor | None, top_k: int, routed_scale: float, shared: Tensor | None) -> Tensor:
    """`empty_parts`, filled: each token's weighted sum, scaled, and the shared part: (T, in) bfloat16."""
    num_shared, size = 0 if pieces is None else pieces.shape[1], parts.shape[1]
    num_tokens = len(parts) // top_k if pieces is None else len(pieces)
    out = torch.empty(num_tokens, size, dtype=parts.dtype, device=parts.device)
    pdl, block = uses_pdl(), min(1024, triton.next_power_of_2(size))
    combine_kernel[num_tokens, triton.cdiv(size, block)](
        parts, pieces, shared, _row_stride(shared), routed_scale, out, size,
        TOP_K=top_k, PAIRS=len(parts) // max(num_tokens, 1), NUM_SHARED=num_shared, HAS_SHARED=shared is not None,
        BLOCK=block, PDL=pdl, **launch_options(pdl),
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


def align(ids: Tensor, num_experts: int, tile: int, num_shared: int = 0) -> Groups:
    """Group pairs by expert, in the order of experts and, within one, of pairs. Room for any routing.

    num_experts: of the bank, of which the last num_shared are taken by every token."""
    groups = empty_groups(ids, num_experts, tile, num_shared)
    fill_groups(groups, ids, num_experts, tile, num_shared)
    return groups


def empty_groups(ids: Tensor, num_experts: int, tile: int, num_shared: int = 0) -> Groups:
    """Room for what `fill_groups` writes. Arguments as of `align`."""
    num_pairs = len(ids) * (ids.shape[1] + num_shared)
    most_tiles = (num_pairs + min(num_experts, num_pairs) * (tile - 1)) // tile
    options: dict[str, Any] = {"dtype": torch.int32, "device": ids.device}
    return Groups(
        torch.empty(most_tiles * tile, **options), torch.empty(most_tiles, **options), torch.empty(1, **options)
    )


def fill_groups(
    groups: Groups,
    ids: Tensor,
    num_experts: int,
    tile: int,
    num_shared: int = 0,
    x: Tensor | None = None,
    rows: Tensor | None = None,
    *,
    early: bool = False,
) -> None:
    """What `align` says, into `empty_groups` of the same arguments. x, rows and early: as of `kernels.align.align`."""
    if aligning.takes(ids, num_experts):
        aligning.align(ids, num_experts, num_shared, tile, *groups, x, rows, early)
        return
    assert rows is None, "no kernel here brings rows into the order of products"
    pdl = uses_pdl()
    align_kernel[(num_experts,)](
        ids, *groups, ids.numel(), TOP_K=ids.shape[1], NUM_SHARED=num_shared, NUM_EXPERTS=num_experts,
        BINS=max(32, triton.next_power_of_2(num_experts)), TILE=tile, TILE_BLOCK=triton.next_power_of_2(tile),
        CHUNK=min(ALIGN_CHUNK, max(128, triton.next_power_of_2(ids.numel()))), PDL=pdl, **launch_options(pdl),
    )  # fmt: skip


def quantise_pairs(x: Tensor, ids: Tensor, up: ExpertWeights) -> Tensor:
    """e4m3 codes of each pair's token, with the input scale of its expert: (pairs, in), or (T, in) where there is one
    scale."""
    num_tokens, pairs_per_token = len(ids), ids.shape[1] + up.num_shared
    one_scale = up.one_input_scale and not up.num_shared
    rows, size = num_tokens * (1 if one_scale else pairs_per_token), x.shape[1]
    pairs = pairs_per_token if not one_scale and num_tokens >= QUANTISE_TOGETHER else 1
    out = torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    pdl, block = uses_pdl(), min(1024, triton.next_power_of_2(size))
    quantise_pairs_kernel[rows // pairs, triton.cdiv(size, block)](
        x, x.stride(0), ids, up.input_scale, out, size,
        **_counts(up, ids.shape[1]), PAIRS=pairs, ONE_SCALE=one_scale, BLOCK=block, PDL=pdl, **launch_options(pdl),
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
    pieces: Tensor | None = None,
) -> None:
    """One projection of every pair, into `out`. Without pair_weights: up; with them: down, that of the shared expert's
    pieces into `pieces`.

    x: row p // pairs_per_x belongs to pair p; FP8: codes. groups: None where every pair is a tile of its own.
    """
    rows, row_size, pdl = out.shape[1], bank.codes.shape[2], uses_pdl()
    sorted_pairs, tile_experts, num_tiles = groups or (None, ids, None)
    num_tiles_at_most = len(out) if groups is None else tile_experts.numel()
    grouped_kernel[(num_tiles_at_most * triton.cdiv(rows, tiles.rows),)](
        x, x.stride(0), bank.codes, bank.block_scales, bank.scale, next_input_scale,
        sorted_pairs, tile_experts, num_tiles, pair_weights, out, pieces, len(out),
        num_rows=rows, num_columns=x.shape[1], row_size=row_size,
        PAIRS_PER_X=pairs_per_x, **_counts(bank, ids.shape[1]),
        SCHEME=bank.scheme, IS_UP=pair_weights is None, QUANTISE_OUT=out.dtype == torch.float8_e4m3fn,
        IS_SINGLE=groups is None, ROWS=tiles.rows, PAIRS=tiles.pairs, COLUMNS=tiles.columns, STAGES=tiles.num_stages,
        FAST=tiles.fast, ASM=capability() >= 80, PDL=pdl, num_warps=tiles.num_warps, **launch_options(pdl),
    )  # fmt: skip


def _counts(bank: ExpertWeights, top_k: int) -> dict[str, int]:
    return {"TOP_K": top_k, "NUM_SHARED": bank.num_shared, "NUM_EXPERTS": len(bank.codes)}


def _empty_hidden(x: Tensor, num_pairs: int, inter: int, down: ExpertWeights) -> Tensor:
    dtype = torch.float8_e4m3fn if down.scheme == FP8 else x.dtype
    return torch.empty(num_pairs, inter, dtype=dtype, device=x.device)


def _row_stride(shared: Tensor | None) -> int:
    return 0 if shared is None else shared.stride(0)
