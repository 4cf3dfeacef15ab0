"""SSD scan: Lightning's heads, heads of 80, chunks of 256, wide and small states."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels.ssd_scan import Chunks, ssd_scan

# Tiles that leave no register free on some architecture: a few words a thread.
STACK = {"heads-of-80": 160, "chunks-of-256": 32, "wide-state": 128, "heads-of-80-chunks-of-256": 32}


def scan(heads: int, head_dim: int, groups: int, state_size: int, chunk_size: int) -> object:
    tokens, inner, bc = 1024, heads * head_dim, groups * state_size
    x, B, C = torch.empty(tokens, inner + 2 * bc, dtype=torch.bfloat16, device="meta").split([inner, bc, bc], 1)
    dt = torch.empty(tokens, 4 * heads, dtype=torch.bfloat16, device="meta")[:, :heads]
    A, D, dt_bias = torch.empty(3, heads, device="meta")
    state = torch.empty(3, heads, head_dim, state_size, device="meta")
    slots, starts, chunk = (torch.empty(n, dtype=torch.int32, device="meta") for n in (2, 3, 8))
    x, B, C = x.unflatten(1, (heads, -1)), B.unflatten(1, (groups, -1)), C.unflatten(1, (groups, -1))
    return ssd_scan(
        x, dt, A, B, C, D, dt_bias, state, slots, starts, slots, chunk_size, (0.0, math.inf),
        Chunks(chunk, chunk, chunk, starts, tokens),
    )  # fmt: skip


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    yield "lightning", partial(scan, 64, 64, 8, 128, 128)
    yield "heads-of-80", partial(scan, 128, 80, 8, 128, 128)
    yield "chunks-of-256", partial(scan, 64, 64, 8, 128, 256)
    yield "heads-of-80-chunks-of-256", partial(scan, 128, 80, 8, 128, 256)
    yield "wide-state", partial(scan, 128, 64, 8, 256, 128)
    yield "small", partial(scan, 8, 32, 2, 16, 16)
