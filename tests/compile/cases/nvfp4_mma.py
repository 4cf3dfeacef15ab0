"""The CUDA kernels for few tokens and NVFP4 weights: each tile of the tables at Lightning's and Super's sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels import nvfp4_mma
from hemiola.kernels.experts import ExpertWeights
from hemiola.kernels.linear_nvfp4 import MMA_TILE, MMA_TILE_OF_MANY_ROWS
from hemiola.kernels.nvfp4_mma import DIRECT, GROUP_TILES, RowsTile


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def linear(tokens: int, rows: int, columns: int, tile: RowsTile) -> object:
    codes = empty(rows, columns // 2, dtype=torch.uint8)
    scales = empty(rows, columns // 32, dtype=torch.int32)
    return nvfp4_mma.linear(empty(tokens, columns), codes, scales, 0.1, True, None, tile)


def bank(experts: int, rows: int, columns: int) -> ExpertWeights:
    words = -(-columns // 64) * 8
    codes = empty(experts, rows, words, dtype=torch.int32)
    return ExpertWeights(
        codes, empty(experts, rows, words // 8, dtype=torch.int32), empty(experts, dtype=torch.float32), None
    )


def experts(tokens: int, top_k: int, num_experts: int, hidden: int, inter: int) -> object:
    up, down = bank(num_experts, inter, hidden), bank(num_experts, hidden, inter)
    ids = empty(tokens, top_k, dtype=torch.int32)
    x = empty(tokens, hidden)
    return nvfp4_mma.experts(x, ids, empty(tokens, top_k, dtype=torch.float32), up, down, 2.5, x)


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    yield "shared-up", partial(linear, 8, 3712, 2688, MMA_TILE)
    yield "lm-head", partial(linear, 1, 131072, 2688, MMA_TILE_OF_MANY_ROWS)
    for tokens in range(1, len(DIRECT) + 1):
        yield f"experts-{tokens}", partial(experts, tokens, 6, 128, 2688, 1856)
    for most, _ in GROUP_TILES:
        yield f"experts-{most}", partial(experts, int(most * 128 / 6), 6, 128, 2688, 1856)
    yield "super", partial(experts, 1, 22, 512, 1024, 2688)
