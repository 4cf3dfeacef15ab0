"""Products whose columns are shared out among several programs, with a sum that does not depend on who is first.

Each program leaves its partial sum in memory and takes a ticket; whoever takes a tile's last ticket adds the partial
sums, in their order. Tickets are integers: nothing is added in the order in which programs happen to arrive.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TICKETS = 1 << 14


class DotTile(NamedTuple):
    """Tile of a program of a tensor-core product: weight rows, tokens, and columns a step.

    programs: how many to aim for by splitting the columns, 0 for no split.
    """

    rows: int
    tokens: int
    columns: int
    stages: int
    warps: int
    programs: int = 0


class Split(NamedTuple):
    """grid: programs by weight rows, tokens, splits. partial: float32, a tile a split. tickets: int32, one a tile."""

    grid: tuple[int, int, int]
    partial: Tensor | None
    tickets: Tensor | None


def split(tile: DotTile, num_rows: int, num_tokens: int, num_columns: int, device: torch.device) -> Split:
    """How `tile`'s programs share a product of these sizes. Kernels that share tickets run one after another."""
    row_tiles, token_tiles = triton.cdiv(num_rows, tile.rows), triton.cdiv(num_tokens, tile.tokens)
    num_tiles = row_tiles * token_tiles
    splits = max(1, min(tile.programs // num_tiles, triton.cdiv(num_columns, tile.columns)))
    if splits == 1 or num_tiles > MAX_TICKETS:
        return Split((row_tiles, token_tiles, 1), None, None)
    partial = torch.empty(splits * num_tiles * tile.rows * tile.tokens, dtype=torch.float32, device=device)
    return Split((row_tiles, token_tiles, splits), partial, tickets(device))


@cache
def tickets(device: torch.device) -> Tensor:
    """MAX_TICKETS zeros, which they are again after each kernel. Kernels that share them run one after another."""
    return torch.zeros(MAX_TICKETS, dtype=torch.int32, device=device)


@triton.jit
def add_splits(acc, partial_ptr, ticket_ptr, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """The sum of all splits' acc, (ROWS, TOKENS), and whether this program is the one that has it.

    Tickets are 0 before and afterwards.
    """
    num_tiles = tl.num_programs(0) * tl.num_programs(1)
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    offsets = tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    split_stride = num_tiles.to(tl.int64) * (ROWS * TOKENS)
    tile_ptr = partial_ptr + tile.to(tl.int64) * (ROWS * TOKENS) + offsets
    tl.store(tile_ptr + tl.program_id(2) * split_stride, acc)
    tl.debug_barrier()
    is_last = tl.atomic_add(ticket_ptr + tile, 1, sem="acq_rel") == tl.num_programs(2) - 1
    if is_last:
        acc = tl.load(tile_ptr, cache_modifier=".cg")
        for other in range(1, tl.num_programs(2)):
            acc += tl.load(tile_ptr + other * split_stride, cache_modifier=".cg")
        tl.store(ticket_ptr + tile, 0)
    return acc, is_last
