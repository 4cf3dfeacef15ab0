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

from hemiola.kernels import nvfp4, nvfp4_mma
from hemiola.kernels.launch import (
    gdc_launch_dependents,
    gdc_wait,
    is_interpreted,
    launch_options,
    shared_memory,
    uses_pdl,
)
from hemiola.kernels.nvfp4_mma import RowsTile
from hemiola.kernels.prefetch import prefetch_rows
from hemiola.kernels.quantize import finish_tile
from hemiola.kernels.split_k import DotTile, add_splits, split

MMA_TOKENS = 8  # so many take the CUDA kernel
MMA_TILE = RowsTile(8, 2, 8, 2)
MMA_TILE_OF_MANY_ROWS = RowsTile(8, 8, 1, 2)
MANY_ROWS = 1 << 15  # enough to fill a GPU without sharing out the columns
# By the most tokens that a tile is for, the last one for more.
TILES = (
    (16, DotTile(64, 16, 128, 5, 4, 264)),
    (32, DotTile(64, 32, 128, 4, 4, 264)),
    (64, DotTile(64, 64, 128, 4, 4, 264)),
    (512, DotTile(64, 128, 128, 3, 4, 264)),
    (1 << 31, DotTile(128, 128, 64, 4, 8)),
)
SMALL_SHARED = 128 << 10  # a GPU with less has room for two stages only
INVARIANT = DotTile(64, 64, 128, 4, 4)


@triton.jit(do_not_specialize=["num_tokens"])
def _linear_nvfp4(
    x_ptr,
    packed_ptr,
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
    row_bytes,
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
    BYTES: tl.constexpr = COLUMNS // 2
    WORDS: tl.constexpr = COLUMNS // 32
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    # Rows and tokens past the end repeat the last one: they are computed, and not stored.
    row = tl.minimum(rows, num_rows - 1).to(tl.int64)
    in_bytes = tl.arange(0, BYTES)
    in_words = tl.arange(0, WORDS)
    columns = in_bytes // 32 * 64 + in_bytes % 32  # of the lo codes; the hi ones are 32 further
    row_ptr = packed_ptr + row * row_bytes
    scale_row_ptr = scales_ptr + row * (row_bytes // 16)
    packed_ptr = row_ptr[:, None] + in_bytes[None, :]
    scales_ptr = scale_row_ptr[:, None] + in_words[None, :]
    x_ptr += tl.minimum(tokens, num_tokens - 1).to(tl.int64)[None, :] * x_stride + columns[:, None]
    steps = tl.cdiv(row_bytes, BYTES)
    first = tl.program_id(2) * steps // tl.num_programs(2)
    last = (tl.program_id(2) + 1) * steps // tl.num_programs(2)
    if PDL:
        prefetch_rows(row_ptr, first * BYTES, tl.minimum(last * BYTES, row_bytes))
        prefetch_rows(scale_row_ptr, first * WORDS * 4, tl.minimum(last * BYTES, row_bytes) // 4)
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        if IS_EVEN:
            packed = tl.load(packed_ptr + step * BYTES)
            words = tl.load(scales_ptr + step * WORDS)
            lo_x = tl.load(x_ptr + step * COLUMNS)
            hi_x = tl.load(x_ptr + step * COLUMNS + 32)
        else:
            left = num_columns - step * COLUMNS
            packed = tl.load(packed_ptr + step * BYTES, (in_bytes < row_bytes - step * BYTES)[None, :], 0)
            words = tl.load(scales_ptr + step * WORDS, (in_words < row_bytes // 16 - step * WORDS)[None, :], 0)
            lo_x = tl.load(x_ptr + step * COLUMNS, (columns < left)[:, None], 0.0)
            hi_x = tl.load(x_ptr + step * COLUMNS + 32, (columns + 32 < left)[:, None], 0.0)
        lo_scale, hi_scale = nvfp4.block_scales(words)
        lo_scale = nvfp4.per_byte(lo_scale, ROWS, WORDS)
        hi_scale = nvfp4.per_byte(hi_scale, ROWS, WORDS)
        lo, hi = nvfp4.decode(packed, lo_scale, hi_scale, ASM)
        acc = tl.dot(lo, lo_x, acc)
        acc = tl.dot(hi, hi_x, acc)
    is_mine = (tokens < num_tokens)[None, :] & (rows < num_rows)[:, None]
    if IS_SPLIT:
        acc, is_last = add_splits(acc, partial_ptr, ticket_ptr, ROWS, TOKENS)
        is_mine = is_mine & is_last
    y = finish_tile(acc * alpha, out_scale, RELU_SQUARED, QUANTIZES)
    tl.store(y_ptr + tokens.to(tl.int64)[None, :] * num_rows + rows[:, None], y, mask=is_mine)


def linear_nvfp4(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    scale: float,
    relu_squared: bool = False,
    out_scale: float | None = None,
    invariant: bool = False,
) -> Tensor:
    """x @ (weight * scale)^T, finished as `hemiola.kernels.quantize` says.

    x: (T, in) bfloat16, rows contiguous. packed, scales: of `nvfp4.pack_codes` and `nvfp4.pack_scales`. invariant: one
    tile for any T. Returns (T, out) bfloat16, or float8_e4m3fn where out_scale is given.
    """
    num_tokens = len(x)
    if num_tokens <= MMA_TOKENS and not invariant:
        mma_tile = MMA_TILE_OF_MANY_ROWS if len(packed) >= MANY_ROWS else MMA_TILE
        if nvfp4_mma.takes(x, packed.shape[1], mma_tile):
            return nvfp4_mma.linear(x, packed, scales, scale * nvfp4.REMAINDER, relu_squared, out_scale, mma_tile)
    tile = INVARIANT if invariant else next(tile for most, tile in TILES if num_tokens <= most)
    if shared_memory() < SMALL_SHARED:
        tile = tile._replace(stages=min(tile.stages, 2))
    return dot(x, packed, scales, scale, relu_squared, out_scale, tile)


def dot(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    scale: float,
    relu_squared: bool,
    out_scale: float | None,
    tile: DotTile,
) -> Tensor:
    """The product in one kernel. Arguments as of `linear_nvfp4`."""
    num_tokens, num_columns = x.shape
    num_rows, row_bytes = packed.shape
    y_dtype = x.dtype if out_scale is None else torch.float8_e4m3fn
    y, pdl = torch.empty(num_tokens, num_rows, dtype=y_dtype, device=x.device), uses_pdl()
    if not y.numel():
        return y
    grid, partial, tickets = split(tile, num_rows, num_tokens, 2 * row_bytes, x.device)
    _linear_nvfp4[grid](
        x, packed, scales, y, partial, tickets, x.stride(0), scale * nvfp4.REMAINDER,
        1.0 if out_scale is None else out_scale, num_tokens, num_rows, num_columns, row_bytes,
        ROWS=tile.rows, TOKENS=tile.tokens, COLUMNS=tile.columns, IS_EVEN=num_columns % tile.columns == 0,
        IS_SPLIT=grid[2] > 1, RELU_SQUARED=relu_squared, QUANTIZES=out_scale is not None, PDL=pdl,
        ASM=not is_interpreted(), STAGES=tile.stages, num_warps=tile.warps, **launch_options(pdl),
    )  # fmt: skip
    return y
