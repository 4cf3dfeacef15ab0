"""The order in which weights lie in memory: tiles of 16 rows and a piece, 64 bytes, of each; row by row inside.

What a warp reads at a time, one kilobyte, lies in one piece, as memory wants it; a piece is still read by four threads
with 16 bytes each, wherever it goes. Rows are padded with zeros to whole pieces, and a weight with rows to whole tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 16
"""Rows of a tile."""

PIECE_BYTES = 64
"""Bytes of a row in a tile."""


@triton.jit
def tile_row(row, row_size, PIECE: tl.constexpr):
    """Where a row begins in its weight; `tile_column` says how far from there a column of it lies.

    row_size and PIECE: elements of a row and of a piece."""
    return row // 16 * (row_size * 16) + row % 16 * PIECE


@triton.jit
def tile_column(column, PIECE: tl.constexpr):
    return column // PIECE * (16 * PIECE) + column % PIECE


@triton.jit
def whole_rows(num_rows):
    """Rows of a weight in memory."""
    return (num_rows + 15) // 16 * 16


def tiled_shape(rows: int, columns: int, dtype: torch.dtype) -> tuple[int, int]:
    """Rows and columns of a weight in tiles."""
    piece = PIECE_BYTES // dtype.itemsize
    return -(-rows // TILE) * TILE, -(-columns // piece) * piece


def write_tiles(weight: Tensor, out: Tensor) -> Tensor:
    """weight: (rows, columns), one after the other; out: of its `tiled_shape`, contiguous, is written and returned."""
    rows, columns = weight.shape
    as_integers = torch.uint8 if weight.dtype.itemsize == 1 else torch.int16
    source, target = weight.view(as_integers), out.view(as_integers)
    if weight.shape != out.shape:
        source = torch.nn.functional.pad(source, (0, out.shape[1] - columns, 0, out.shape[0] - rows))
    piece = PIECE_BYTES // weight.dtype.itemsize
    pieces = source.view(-1, TILE, out.shape[1] // piece, piece)
    target.view(len(pieces), -1, TILE, piece).copy_(pieces.transpose(1, 2))
    return out
