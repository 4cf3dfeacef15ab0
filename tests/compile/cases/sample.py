"""The argmax of one row and of many, in both types."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels.sample import argmax


def best(rows: int, vocab: int, dtype: torch.dtype) -> object:
    return argmax(torch.empty(rows, vocab, dtype=dtype, device="meta"))


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    for kind, dtype in (("bf16", torch.bfloat16), ("float32", torch.float32)):
        for rows in (1, 256):
            yield f"{rows}-{kind}", partial(best, rows, 131072, dtype)
    yield "small", partial(best, 3, 501, torch.float32)
