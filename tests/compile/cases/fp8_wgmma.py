"""FP8 linears of a few tokens on wgmma: Lightning's and Nano's sizes, odd ones, and the largest tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels import fp8_wgmma
from hemiola.kernels.fp8_wgmma import Tile
from hemiola.kernels.linear_fp8 import Fp8Weight, linear_fp8

SIZES = [(10304, 2688), (2688, 4096), (3712, 2688), (2688, 3712), (144, 1040)]
TILES = [Tile(64, 256, 1, 5), Tile(64, 256, 8, 3), Tile(8, 24, 4, 8), Tile(64, 16, 2, 4)]


def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def linear(tokens: int, rows: int, columns: int, tile: Tile | None = None) -> object:
    x, codes = (empty(torch.float8_e4m3fn, n, columns) for n in (tokens, rows))
    if tile:
        return fp8_wgmma.linear(x, codes, 0.1, True, 0.1, tile)
    assert fp8_wgmma.takes(x, codes)
    return linear_fp8(x, Fp8Weight(codes, 0.1, 0.2, empty(torch.float32, 1)), True, 0.1)


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    for rows, columns in SIZES:
        for tokens in (3, 8, 9, 16, 17, 32):
            yield f"{rows}-{columns}-{tokens}", partial(linear, tokens, rows, columns)
    for tile in TILES:
        yield str(tile), partial(linear, 8, 3712, 2688, tile)


def excludes(name: str, arch: int) -> str | None:
    return None if arch == 90 else "wgmma is an instruction of compute capability 9.0 alone"
