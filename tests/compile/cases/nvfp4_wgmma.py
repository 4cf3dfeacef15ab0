"""The CUDA kernels for many tokens and NVFP4 weights, and the grouping of many pairs: Lightning's and Super's sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels import nvfp4_wgmma
from hemiola.kernels.experts import NVFP4
from tests.compile.cases.rows_mma import banks, empty, linear


def experts(tokens: int, top_k: int, num_experts: int, hidden: int, inter: int, num_shared: int) -> object:
    up, down = banks(NVFP4, num_experts, hidden, inter, num_shared)
    ids = empty(tokens, top_k, dtype=torch.int32)
    x = empty(tokens, hidden)
    assert nvfp4_wgmma.takes_experts(x, up, down, tokens, top_k)
    return nvfp4_wgmma.experts(x, ids, empty(tokens, top_k, dtype=torch.float32), up, down, 2.5, None)


def of_splits(splits: int, early: bool) -> None:
    words, scales = (empty(3712, n, dtype=torch.int32) for n in (336, 42))
    for tile in nvfp4_wgmma.split_tiles(splits):
        if tile.splits == splits:
            nvfp4_wgmma.linear(empty(512, 2688), words, scales, 3712, 0.1, True, 0.1, tile, early=early)


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    for tokens in (65, 128, 256, 512, 8192):
        yield f"linear-{tokens}", partial(linear, tokens, 3712, 2688)
        yield f"linear-down-{tokens}", partial(linear, tokens, 2688, 3712)
    for splits in range(1, 9):
        yield f"linear-of-{splits}", partial(of_splits, splits, False)
        yield f"early-of-{splits}", partial(of_splits, splits, True)
    yield "experts-8192", partial(experts, 8192, 6, 128, 2688, 1856, 0)
    yield "joined-8192", partial(experts, 8192, 6, 128, 2688, 1856, 2)


def excludes(name: str, arch: int) -> str | None:
    return None if arch == 90 else "wgmma is an instruction of compute capability 9.0 alone"
