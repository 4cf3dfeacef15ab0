"""The grouping of many pairs by expert."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels.experts import align


def group(tokens: int, top_k: int, num_experts: int, tile: int) -> object:
    return align(torch.empty(tokens, top_k, dtype=torch.int32, device="meta"), num_experts, tile)


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    yield "lightning", partial(group, 8192, 6, 128, 128)
    yield "super", partial(group, 8192, 22, 512, 64)
