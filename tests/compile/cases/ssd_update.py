"""SSD update of few and many rows: Lightning's heads, heads of 80, wide and small states."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels.ssd_update import ssd_update


def update(rows: int, heads: int, head_dim: int, groups: int, state_size: int) -> object:
    inner, bc = heads * head_dim, groups * state_size
    x, B, C = torch.empty(rows, inner + 2 * bc, dtype=torch.bfloat16, device="meta").split([inner, bc, bc], 1)
    dt = torch.empty(rows, 4 * heads, dtype=torch.bfloat16, device="meta")[:, :heads]
    A, D, dt_bias = torch.empty(3, heads, device="meta")
    state = torch.empty(rows, heads, head_dim, state_size, device="meta")
    x, B, C = x.unflatten(1, (heads, -1)), B.unflatten(1, (groups, -1)), C.unflatten(1, (groups, -1))
    return ssd_update(x, dt, A, B, C, D, dt_bias, state, torch.empty(rows, dtype=torch.int32, device="meta"))


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    yield "one-row", partial(update, 1, 64, 64, 8, 128)
    yield "many-rows", partial(update, 256, 64, 64, 8, 128)
    yield "heads-of-80", partial(update, 256, 128, 80, 8, 128)
    yield "wide-state", partial(update, 256, 128, 64, 8, 256)
    yield "small", partial(update, 8, 8, 32, 2, 16)
