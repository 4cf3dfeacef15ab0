"""The grouping of many pairs by expert."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels.experts import align


def group(tokens: int, top_k: int, num_experts: int, tile: int, num_shared: int) -> object:
    return align(torch.empty(tokens, top_k, dtype=torch.int32, device="meta"), num_experts, tile, num_shared)


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    yield "lightning", partial(group, 8192, 6, 130, 128, 2)
    yield "super", partial(group, 8192, 22, 512, 64, 0)
