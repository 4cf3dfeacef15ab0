"""Products with an NVFP4 weight, decoded on its way into the tensor cores.

Decoding costs integer instructions for every code, so that even one token is best served by the tensor cores, which
leave the other units to it. Weight rows are on the side of the tile where the hardware wants 64; tokens on the side
where it is content with 16. The decoded tile goes from registers into the product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hemiola.kernels import nvfp4_wgmma, rows_mma
from hemiola.kernels.experts import NVFP4
from hemiola.kernels.launch import (
    capability,
    gdc_launch_dependents,
    gdc_wait,
    is_interpreted,
    launch_options,
    shared_memory,
    uses_pdl,
)
from hemiola.kernels.nvfp4 import (
    REMAINDER,
    TENSOR_MEMORY,
    decode_words,
    per_word,
    scale_column,
    scale_row,
    word_column,
    word_row,
)
from hemiola.kernels.quantize import finish_tile
from hemiola.kernels.rows_mma import RowsTile
from hemiola.kernels.split_k import DotTile, add_splits, split

# The CUDA kernel's tiles by the most tokens, for weights of fewer and of more than MANY_ROWS rows, which fill a GPU
# without sharing out the columns. From more tokens on the Triton kernel takes over.
MMA_TILES = (
    (8, RowsTile(8, 2, 8, 2), RowsTile(8, 8, 1, 2)),
    (16, RowsTile(16, 2, 8, 2), RowsTile(16, 8, 1, 4)),
    (32, RowsTile(16, 4, 4, 2), RowsTile(32, 8, 2, 2)),
    (64, RowsTile(16, 8, 2, 2), RowsTile(32, 8, 2, 2)),
)
MANY_ROWS = 1 << 15
# By the most tokens that a tile is for, the last one for more. Columns are a multiple of 128.
TILES = (
    (16, DotTile(64, 16, 128, 5, 4, 264)),
    (32, DotTile(64, 32, 128, 4, 4, 264)),
    (64, DotTile(64, 64, 128, 4, 8, 264)),
    (128, DotTile(128, 64, 128, 4, 8, 264)),
    (512, DotTile(128, 128, 128, 3, 8, 132)),
    (1 << 31, DotTile(256, 128, 128, 3, 8)),
)
SMALL_SHARED = 128 << 10  # a GPU with less has room for two stages of a smaller tile only
INVARIANT = DotTile(64, 64, 128, 4, 4)


@triton.jit(do_not_specialize=["num_tokens"])
def _linear_nvfp4(
    x_ptr,
    words_ptr,
    scales_ptr,
    y_ptr,
    partial_ptr,
    ticket_ptr,
    x_stride,
    alpha,
    out_scale,
    num_tokens,
    num_rows,
    num_columns,
    row_size,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    RELU_SQUARED: tl.constexpr,
    QUANTIZES: tl.constexpr,
    PDL: tl.constexpr,
    ASM: tl.constexpr,
    STAGES: tl.constexpr,
):
    WORDS: tl.constexpr = COLUMNS // 8
    GROUPS: tl.constexpr = COLUMNS // 64
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    # Rows and tokens past the end repeat the last one: they are computed, and not stored.
    row = tl.minimum(rows, num_rows - 1).to(tl.int64)
    in_words, in_groups = tl.arange(0, WORDS), tl.arange(0, GROUPS)
    columns = in_words // 8 * 64 + in_words % 8  # of tile 0; those of tile j are 8 j further
    words_ptr += word_row(row, row_size)[:, None] + word_column(in_words)[None, :]
    scales_ptr += scale_row(row, row_size)[:, None] + scale_column(in_groups)[None, :]
    x_ptr += tl.minimum(tokens, num_tokens - 1).to(tl.int64)[None, :] * x_stride + columns[:, None]
    steps = tl.cdiv(row_size, WORDS)
    first = tl.program_id(2) * steps // tl.num_programs(2)
    last = (tl.program_id(2) + 1) * steps // tl.num_programs(2)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        if IS_EVEN:
            words = tl.load(words_ptr + step * (16 * WORDS))
            scales = tl.load(scales_ptr + step * (16 * GROUPS))
        else:
            left = row_size - step * WORDS
            words = tl.load(words_ptr + step * (16 * WORDS), (in_words < left)[None, :], 0)
            scales = tl.load(scales_ptr + step * (16 * GROUPS), (in_groups < left // 8)[None, :], 0)
        tiles = decode_words(words, per_word(scales, ROWS, GROUPS), ASM)
        for j in tl.static_range(8):
            if IS_EVEN:
                x = tl.load(x_ptr + step * COLUMNS + 8 * j)
            else:
                x = tl.load(
                    x_ptr + step * COLUMNS + 8 * j, (columns < num_columns - step * COLUMNS - 8 * j)[:, None], 0.0
                )
            acc = tl.dot(tiles[j], x, acc)
    is_mine = (tokens < num_tokens)[None, :] & (rows < num_rows)[:, None]
    if IS_SPLIT:
        acc, is_last = add_splits(acc, partial_ptr, ticket_ptr, ROWS, TOKENS)
        is_mine = is_mine & is_last
    y = finish_tile(acc * alpha, out_scale, RELU_SQUARED, QUANTIZES)
    tl.store(y_ptr + tokens.to(tl.int64)[None, :] * num_rows + rows[:, None], y, mask=is_mine)


def linear_nvfp4(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    num_rows: int,
    scale: float,
    relu_squared: bool = False,
    out_scale: float | None = None,
    invariant: bool = False,
    early: bool = False,
) -> Tensor:
    """x @ (weight * scale)^T, finished as `hemiola.kernels.quantize` says.

    x: (T, in) bfloat16, rows contiguous. words, scales: of `nvfp4.pack_words`, for num_rows rows and what they are
    padded with. invariant: one order of summation for any T. early: as of `nvfp4_wgmma.linear`. Returns (T, num_rows)
    bfloat16, or float8_e4m3fn where out_scale is given.
    """
    num_tokens = len(x)
    is_wide = invariant or num_tokens >= nvfp4_wgmma.LEAST_TOKENS
    if is_wide and nvfp4_wgmma.takes(x, num_rows, words.shape[1]):
        return nvfp4_wgmma.linear(
            x, words, scales, num_rows, scale * REMAINDER, relu_squared, out_scale, invariant=invariant, early=early
        )
    if not invariant:
        for most, few_rows, many_rows in MMA_TILES:
            tile = many_rows if num_rows >= MANY_ROWS else few_rows
            if num_tokens <= most and rows_mma.takes(NVFP4, x, 4 * words.shape[1], tile):
                return rows_mma.linear(x, words, scales, num_rows, scale * REMAINDER, relu_squared, out_scale, tile)
    return in_tiles(x, words, scales, num_rows, scale, relu_squared, out_scale, invariant)


def in_tiles(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    num_rows: int,
    scale: float,
    relu_squared: bool,
    out_scale: float | None,
    invariant: bool,
) -> Tensor:
    """The product by the Triton kernel, with the table's tile. Arguments as of `linear_nvfp4`."""
    num_tokens = len(x)
    tile = INVARIANT if invariant else next(tile for most, tile in TILES if num_tokens <= most)
    if capability() in TENSOR_MEMORY:
        tile = tile._replace(rows=64, tokens=min(tile.tokens, 64))
    if shared_memory() < SMALL_SHARED:
        tokens = min(tile.tokens, 64)
        tile = DotTile(min(tile.rows, 128), tokens, 128, min(tile.stages, 2), max(4, tokens // 8), tile.programs)
    return dot(x, words, scales, num_rows, scale, relu_squared, out_scale, tile)


def dot(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    num_rows: int,
    scale: float,
    relu_squared: bool,
    out_scale: float | None,
    tile: DotTile,
) -> Tensor:
    """The product in one Triton kernel. Arguments as of `linear_nvfp4`."""
    num_tokens, num_columns = x.shape
    row_size = words.shape[1]
    y_dtype = x.dtype if out_scale is None else torch.float8_e4m3fn
    y, pdl = torch.empty(num_tokens, num_rows, dtype=y_dtype, device=x.device), uses_pdl()
    if not y.numel():
        return y
    grid, partial, tickets = split(tile, num_rows, num_tokens, 8 * row_size, x.device)
    is_even = row_size % (tile.columns // 8) == 0 and num_columns == 8 * row_size
    _linear_nvfp4[grid](
        x, words, scales, y, partial, tickets, x.stride(0), scale * REMAINDER,
        1.0 if out_scale is None else out_scale, num_tokens, num_rows, num_columns, row_size,
        ROWS=tile.rows, TOKENS=tile.tokens, COLUMNS=tile.columns, IS_EVEN=is_even,
        IS_SPLIT=grid[2] > 1, RELU_SQUARED=relu_squared, QUANTIZES=out_scale is not None, PDL=pdl,
        ASM=not is_interpreted(), STAGES=tile.stages, num_warps=tile.warps, **launch_options(pdl),
    )  # fmt: skip
    return y
