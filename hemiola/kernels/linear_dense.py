"""Products with a weight that is stored as it is multiplied, bfloat16 or e4m3, by activations of the same type.

Two kernels. `gemv` streams the weight once past a few rows with float32 multiply-adds: programs of a few weight rows
are many and small, which fills the memory system from the first moment. `dot` uses the tensor cores, with weight rows
on the side where the hardware wants 64 and tokens on the side where it is content with 16, so that few tokens waste
nothing; columns may be split among programs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hemiola.kernels.launch import gdc_launch_dependents, gdc_wait, launch_options, uses_pdl
from hemiola.kernels.prefetch import prefetch_rows
from hemiola.kernels.quantize import finish_tile
from hemiola.kernels.split_k import DotTile, add_splits, split


class GemvTile(NamedTuple):
    """Weight rows and columns that a program takes at a time."""

    rows: int
    columns: int
    warps: int = 4


_MOST_PIECES = 8  # of a weight row, all of which a thread holds at once


def gemv_tile(tile: GemvTile, in_size: int) -> GemvTile | None:
    """`tile`, with fewer rows of more columns where a row is long; None where it is too long for a program."""
    while tile.columns * _MOST_PIECES < in_size and tile.rows > 1:
        tile = tile._replace(rows=tile.rows // 2, columns=tile.columns * 2)
    return tile if tile.columns * _MOST_PIECES >= in_size else None


@triton.jit
def _gemv(
    x_ptr,
    weight_ptr,
    y_ptr,
    x_stride,
    alpha,
    out_scale,
    num_rows,
    IN: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RELU_SQUARED: tl.constexpr,
    QUANTIZES: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    row_ptr = weight_ptr + tl.minimum(rows, num_rows - 1).to(tl.int64)[:, None] * IN
    weights = ()
    for start in tl.static_range(0, IN, COLUMNS):
        in_columns = start + columns
        if start + COLUMNS <= IN:
            tile = tl.load(row_ptr + in_columns[None, :], eviction_policy="evict_first")
        else:
            tile = tl.load(
                row_ptr + in_columns[None, :], (in_columns < IN)[None, :], 0.0, eviction_policy="evict_first"
            )
        weights = weights + (tile,)  # noqa: RUF005
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for token in tl.static_range(TOKENS):
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in tl.static_range(0, IN, COLUMNS):
            # As many pointers as the weight's tile has, so that both have one layout and nothing is exchanged.
            in_columns = tl.broadcast_to((start + columns)[None, :], (ROWS, COLUMNS))
            if start + COLUMNS <= IN:
                x = tl.load(x_ptr + token * x_stride + in_columns)
            else:
                x = tl.load(x_ptr + token * x_stride + in_columns, in_columns < IN, 0.0)
            acc += weights[start // COLUMNS].to(tl.float32) * x.to(tl.float32)
        y = finish_tile(tl.sum(acc, 1) * alpha, out_scale, RELU_SQUARED, QUANTIZES)
        tl.store(y_ptr + token * num_rows + rows, y, mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_tokens"])
def _dot(
    x_ptr,
    weight_ptr,
    y_ptr,
    partial_ptr,
    ticket_ptr,
    x_stride,
    alpha,
    out_scale,
    num_tokens,
    num_rows,
    num_columns,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    RELU_SQUARED: tl.constexpr,
    QUANTIZES: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.arange(0, COLUMNS)
    steps = tl.cdiv(num_columns, COLUMNS)
    first = tl.program_id(2) * steps // tl.num_programs(2)
    last = (tl.program_id(2) + 1) * steps // tl.num_programs(2)
    # Rows and tokens past the end repeat the last one: they are computed, and not stored.
    row_ptr = weight_ptr + tl.minimum(rows, num_rows - 1).to(tl.int64) * num_columns
    weight_ptr = row_ptr[:, None] + columns[None, :]
    x_ptr += tl.minimum(tokens, num_tokens - 1).to(tl.int64)[None, :] * x_stride + columns[:, None]
    if PDL:
        item: tl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth // 8
        prefetch_rows(row_ptr, first * COLUMNS * item, tl.minimum(last * COLUMNS, num_columns) * item)
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        start = step * COLUMNS
        if IS_EVEN:
            weight = tl.load(weight_ptr + start)
            x = tl.load(x_ptr + start)
        else:
            is_column = columns < num_columns - start
            weight = tl.load(weight_ptr + start, is_column[None, :], 0.0)
            x = tl.load(x_ptr + start, is_column[:, None], 0.0)
        # Hopper keeps few bits of a sum of e4m3 products: after each step it is added in float32.
        acc = tl.dot(weight, x, acc, max_num_imprecise_acc=COLUMNS)
    is_mine = (tokens < num_tokens)[None, :] & (rows < num_rows)[:, None]
    if IS_SPLIT:
        acc, is_last = add_splits(acc, partial_ptr, ticket_ptr, ROWS, TOKENS)
        is_mine = is_mine & is_last
    y = finish_tile(acc * alpha, out_scale, RELU_SQUARED, QUANTIZES)
    tl.store(y_ptr + tokens.to(tl.int64)[None, :] * num_rows + rows[:, None], y, mask=is_mine)


def output(x: Tensor, num_rows: int, out_scale: float | None) -> Tensor:
    """Where a product of x goes."""
    dtype = torch.bfloat16 if out_scale is None else torch.float8_e4m3fn
    return torch.empty(len(x), num_rows, dtype=dtype, device=x.device)


def gemv(
    x: Tensor, weight: Tensor, alpha: float, relu_squared: bool, out_scale: float | None, tile: GemvTile
) -> Tensor:
    """alpha * (x @ weight^T), finished, for a few rows x. Arguments as of `dot`."""
    num_tokens, in_size = x.shape
    num_rows = len(weight)
    y, pdl = output(x, num_rows, out_scale), uses_pdl()
    if not y.numel():
        return y
    _gemv[(triton.cdiv(num_rows, tile.rows),)](
        x, weight, y, x.stride(0), alpha, 1.0 if out_scale is None else out_scale, num_rows,
        IN=in_size, TOKENS=num_tokens, ROWS=tile.rows, COLUMNS=tile.columns,
        RELU_SQUARED=relu_squared, QUANTIZES=out_scale is not None, PDL=pdl,
        num_warps=tile.warps, **launch_options(pdl),
    )  # fmt: skip
    return y


def dot(x: Tensor, weight: Tensor, alpha: float, relu_squared: bool, out_scale: float | None, tile: DotTile) -> Tensor:
    """alpha * (x @ weight^T), finished as `hemiola.kernels.quantize` says.

    x: (T, in), rows contiguous; weight: (out, in), contiguous; both bfloat16 or both float8_e4m3fn.
    Returns (T, out) bfloat16, or float8_e4m3fn where out_scale is given.
    """
    num_tokens, in_size = x.shape
    num_rows = len(weight)
    y, pdl = output(x, num_rows, out_scale), uses_pdl()
    if not y.numel():
        return y
    grid, partial, tickets = split(tile, num_rows, num_tokens, in_size, x.device)
    _dot[grid](
        x, weight, y, partial, tickets, x.stride(0), alpha, 1.0 if out_scale is None else out_scale,
        num_tokens, num_rows, in_size,
        ROWS=tile.rows, TOKENS=tile.tokens, COLUMNS=tile.columns, IS_EVEN=in_size % tile.columns == 0,
        IS_SPLIT=grid[2] > 1, RELU_SQUARED=relu_squared, QUANTIZES=out_scale is not None, PDL=pdl, STAGES=tile.stages,
        num_warps=tile.warps, **launch_options(pdl),
    )  # fmt: skip
    return y
