"""Pairs grouped by expert on wgmma: each tile of the tables at Lightning's and Super's sizes, and at odd ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels import rows_mma
from hemiola.kernels.experts import SharedLinears
from hemiola.kernels.grouped_wgmma import WgmmaTile
from hemiola.kernels.rows_mma import WGMMA_TILES
from tests.compile.cases.rows_mma import SCHEMES, banks, empty

# Experts, top_k, in, inter.
SIZES = {"lightning": (128, 6, 2688, 1856), "super": (512, 22, 1024, 2688), "odd": (16, 4, 1040, 784)}


def experts(
    scheme: int, tile: WgmmaTile, most: float, num_experts: int, top_k: int, hidden: int, inter: int, num_shared: int
) -> object:
    """As many tokens as the table has the tile for."""
    up, down = banks(scheme, num_experts, hidden, inter, num_shared)
    tokens = int(most * num_experts / top_k)
    x, ids = empty(tokens, hidden), empty(tokens, top_k, dtype=torch.int32)
    assert rows_mma.takes_experts(x, up, down, tokens, top_k)
    assert rows_mma.experts_tile(x, up, down, tokens, top_k) == tile
    shared = None if num_shared else SharedLinears(lambda: x, lambda hidden, early: hidden, beside=False)
    return rows_mma.experts(x, ids, empty(tokens, top_k, dtype=torch.float32), up, down, 2.5, shared)


def cases_of(name: str) -> Iterable[tuple[str, Callable[[], object]]]:
    """Of a scheme, with and without pieces of the shared expert."""
    scheme = SCHEMES[name]
    for most, tile in WGMMA_TILES[scheme]:
        for size, sizes in SIZES.items() if tile else ():
            yield f"{name}-{most}-{size}", partial(experts, scheme, tile, most, *sizes, 0)
            yield f"{name}-{most}-{size}-joined", partial(experts, scheme, tile, most, *sizes, 2)


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    return cases_of("fp8")


def excludes(name: str, arch: int) -> str | None:
    return None if arch == 90 else "wgmma is an instruction of compute capability 9.0 alone"
