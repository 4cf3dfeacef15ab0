"""The CUDA kernels for few tokens and NVFP4 weights: each tile of the tables at Lightning's and Super's sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels import nvfp4_mma
from hemiola.kernels.experts import ExpertWeights
from hemiola.kernels.linear_nvfp4 import MMA_TILES, linear_nvfp4
from hemiola.kernels.nvfp4 import words_per_row
from hemiola.kernels.nvfp4_mma import DIRECT, GROUP_TILES


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def linear(tokens: int, rows: int, columns: int) -> object:
    size = words_per_row(columns)
    words, scales = (empty(rows, n, dtype=torch.int32) for n in (size, size // 8))
    return linear_nvfp4(empty(tokens, columns), words, scales, rows, 0.1, True)


def bank(experts: int, rows: int, columns: int) -> ExpertWeights:
    words = words_per_row(columns)
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
    for tokens, _, _ in MMA_TILES:
        yield f"shared-up-{tokens}", partial(linear, tokens, 3712, 2688)
        yield f"lm-head-{tokens}", partial(linear, tokens, 131072, 2688)
    for tokens in range(1, len(DIRECT) + 1):
        yield f"experts-{tokens}", partial(experts, tokens, 6, 128, 2688, 1856)
    for most, _ in GROUP_TILES:
        yield f"experts-{most}", partial(experts, int(most * 128 / 6), 6, 128, 2688, 1856)
    yield "super", partial(experts, 1, 22, 512, 1024, 2688)
