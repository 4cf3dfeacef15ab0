"""Embedding tables of each type."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels.embedding import embedding


def lookup(dtype: torch.dtype, hidden: int) -> object:
    ids = torch.empty(64, dtype=torch.int64, device="meta")
    return embedding(ids, torch.empty(131072, hidden, dtype=dtype, device="meta"))


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield f"{dtype}".removeprefix("torch."), partial(lookup, dtype, 2688)
    yield "small", partial(lookup, torch.bfloat16, 256)
