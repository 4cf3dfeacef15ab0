"""FP8 linears of a few tokens on wgmma: Lightning's and Nano's sizes, odd ones, and the largest tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels import dense_wgmma
from hemiola.kernels.dense_wgmma import Tile
from hemiola.kernels.linear_bf16 import linear_bf16
from hemiola.kernels.linear_fp8 import Fp8Weight, linear_fp8

DTYPES = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}
SIZES = [(10304, 2688), (2688, 4096), (3712, 2688), (2688, 3712), (144, 1040)]
TILES = [
    Tile(64, 256, 1, 5, 4),
    Tile(64, 256, 8, 3, 3),
    Tile(8, 24, 4, 8, 8),
    Tile(64, 16, 2, 4, 4),
    Tile(128, 128, 2, 5, 3),
]


def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def linear(dtype: torch.dtype, tokens: int, rows: int, columns: int, tile: Tile | None = None) -> object:
    x, weight = (empty(dtype, n, columns) for n in (tokens, rows))
    if tile:
        return dense_wgmma.linear(x, weight, 0.1, True, 0.1, tile)
    assert dense_wgmma.takes(x, weight)
    if dtype == torch.bfloat16:
        return linear_bf16(x, weight, True)
    return linear_fp8(x, Fp8Weight(weight, 0.1, 0.2, empty(torch.float32, 1)), True, 0.1)


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    for name, dtype in DTYPES.items():
        for rows, columns in SIZES:
            for tokens in (3, 8, 9, 16, 17, 32, 33, 64):
                yield f"{name}-{rows}-{columns}-{tokens}", partial(linear, dtype, tokens, rows, columns)
        for tile in TILES:
            yield f"{name}-{tile}", partial(linear, dtype, 8, 3712, 2688, tile)


def excludes(name: str, arch: int) -> str | None:
    return None if arch == 90 else "wgmma is an instruction of compute capability 9.0 alone"
