"""NVFP4 linears: each tile of the table at Lightning's sizes, odd sizes, and the dequantised weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels import nvfp4
from hemiola.kernels.linear_nvfp4 import TILES, linear_nvfp4


def packed(out_size: int, in_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    columns = nvfp4.padded_columns(in_size)
    return (
        torch.empty(out_size, columns // 2, dtype=torch.uint8, device="meta"),
        torch.empty(out_size, columns // 32, dtype=torch.int32, device="meta"),
    )


def product(tokens: int, out_size: int, in_size: int, relu_squared: bool = False, invariant: bool = False) -> object:
    x = torch.empty(tokens, in_size, dtype=torch.bfloat16, device="meta")
    return linear_nvfp4(x, *packed(out_size, in_size), 0.1, relu_squared, None, invariant)


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    for tokens, _ in TILES:
        yield f"up-{min(tokens, 8192)}", partial(product, min(tokens, 8192), 3712, 2688, True)
    yield "down", partial(product, 1, 2688, 3712)
    yield "odd", partial(product, 1, 100, 144)
    yield "invariant", partial(product, 8192, 3712, 2688, True, True)
