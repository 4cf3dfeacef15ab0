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


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    yield "linear-8192", partial(linear, 8192, 3712, 2688)
    yield "experts-8192", partial(experts, 8192, 6, 128, 2688, 1856, 0)
    yield "joined-8192", partial(experts, 8192, 6, 128, 2688, 1856, 2)


def excludes(name: str, arch: int) -> str | None:
    return None if arch == 90 else "wgmma is an instruction of compute capability 9.0 alone"
