"""NVFP4 linears: each tile of the table at Lightning's sizes, odd sizes, and the dequantised weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels.linear_nvfp4 import TILES, in_tiles
from hemiola.kernels.nvfp4 import words_per_row


def product(tokens: int, out_size: int, in_size: int, relu_squared: bool = False, invariant: bool = False) -> object:
    x, size = torch.empty(tokens, in_size, dtype=torch.bfloat16, device="meta"), words_per_row(in_size)
    rows = -(-out_size // 16) * 16
    words, scales = (torch.empty(rows, n, dtype=torch.int32, device="meta") for n in (size, size // 8))
    return in_tiles(x, words, scales, out_size, 0.1, relu_squared, None, invariant)


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    for most, _ in TILES:
        yield f"up-{min(most, 8192)}", partial(product, min(most, 8192), 3712, 2688, True)
    yield "down", partial(product, 1, 2688, 3712)
    yield "odd", partial(product, 1, 100, 144)
    yield "invariant", partial(product, 8192, 3712, 2688, True, True)
