"""Prefill attention: Lightning's heads in both cache types; five heads to a KV head; small and odd heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels.attention_prefill import attention_prefill

SHAPES = {
    # query heads, KV heads, head_dim
    "lightning": (32, 2, 128),
    "five-to-one": (40, 8, 128),
    "small": (8, 2, 32),
    "odd": (6, 2, 80),
}


def prefill(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> object:
    cache = torch.empty(1000, 16, kv_heads, head_dim, dtype=dtype, device="meta")
    q = torch.empty(8192, heads, head_dim, dtype=torch.bfloat16, device="meta")
    table = torch.empty(2, 512, dtype=torch.int32, device="meta")
    lens = torch.empty(2, dtype=torch.int32, device="meta")
    starts = torch.empty(3, dtype=torch.int32, device="meta")
    return attention_prefill(q, cache, cache, table, starts, lens, 0.1, 1.0, 1.0, 8000)


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    for name, shape in SHAPES.items():
        for kind, dtype in (("bf16", torch.bfloat16), ("e4m3", torch.float8_e4m3fn)):
            yield f"{name}-{kind}", partial(prefill, *shape, dtype)


def excludes(name: str, arch: int) -> str | None:
    return "e4m3 conversions need compute capability 8.9" if "e4m3" in name and arch < 89 else None


# On sm_80 and sm_89 the indices of a group that is no power of two take four registers too many, outside of the loops.
STACK = {"five-to-one-bf16": 16}
