"""NVFP4 linears: each tile of the table at Lightning's sizes, odd sizes, and the dequantised weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels.linear_nvfp4 import INVARIANT, TILES, dot
from hemiola.kernels.nvfp4 import words_per_row
from hemiola.kernels.split_k import DotTile


def product(tokens: int, out_size: int, in_size: int, tile: DotTile, relu_squared: bool = False) -> object:
    x, size = torch.empty(tokens, in_size, dtype=torch.bfloat16, device="meta"), words_per_row(in_size)
    words, scales = (
        torch.empty(-(-out_size // 16) * 16, n, dtype=torch.int32, device="meta") for n in (size, size // 8)
    )
    return dot(x, words, scales, out_size, 0.1, relu_squared, None, tile)


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    for most, tile in TILES:
        yield f"up-{min(most, 8192)}", partial(product, min(most, 8192), 3712, 2688, tile, True)
    yield "down", partial(product, 1, 2688, 3712, TILES[0][1])
    yield "odd", partial(product, 1, 100, 144, TILES[0][1])
    yield "invariant", partial(product, 8192, 3712, 2688, INVARIANT, True)
