"""The grouping of pairs by expert: few, with rows of x, and many."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels.align import empty_rows
from hemiola.kernels.experts import align, empty_groups, fill_groups


def group(tokens: int, top_k: int, num_experts: int, tile: int, num_shared: int) -> object:
    return align(torch.empty(tokens, top_k, dtype=torch.int32, device="meta"), num_experts, tile, num_shared)


def with_rows(tokens: int, top_k: int, num_experts: int, tile: int, num_shared: int, columns: int) -> object:
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device="meta")
    x = torch.empty(tokens, columns, dtype=torch.bfloat16, device="meta")
    groups = empty_groups(ids, num_experts, tile, num_shared)
    fill_groups(groups, ids, num_experts, tile, num_shared, x, empty_rows(x))
    return groups


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    yield "lightning", partial(group, 8192, 6, 130, 128, 2)
    yield "super", partial(group, 8192, 22, 512, 64, 0)
    yield "few", partial(with_rows, 64, 6, 130, 8, 2, 2688)
    yield "few-super", partial(group, 100, 22, 512, 24, 0)
