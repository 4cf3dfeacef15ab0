"""Decode attention: Lightning's heads in both cache types, split and not; five heads to a KV head; small heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels.attention_decode import attention_decode

SHAPES = {
    # rows, query heads, KV heads, head_dim, columns of the table
    "split": (8, 32, 2, 128, 2048),
    "one row": (1, 32, 2, 128, 2048),
    "few splits": (64, 32, 2, 128, 2048),
    "whole": (256, 32, 2, 128, 512),
    "five-to-one": (8, 40, 8, 128, 512),
    "small": (4, 8, 2, 32, 8),
    "odd": (4, 6, 2, 80, 64),
}


def decode(
    rows: int, heads: int, kv_heads: int, head_dim: int, columns: int, dtype: torch.dtype, invariant: bool = False
) -> object:
    cache = torch.empty(1000, 16, kv_heads, head_dim, dtype=dtype, device="meta")
    q = torch.empty(rows, heads, head_dim, dtype=torch.bfloat16, device="meta")
    table = torch.empty(rows, columns, dtype=torch.int32, device="meta")
    lens = torch.empty(rows, dtype=torch.int32, device="meta")
    return attention_decode(q, cache, cache, table, lens, 0.1, 1.0, 1.0, invariant=invariant)


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    for name, shape in SHAPES.items():
        for kind, dtype in (("bf16", torch.bfloat16), ("e4m3", torch.float8_e4m3fn)):
            yield f"{name}-{kind}", partial(decode, *shape, dtype)
    yield "invariant-bf16", partial(decode, *SHAPES["split"], torch.bfloat16, invariant=True)


def excludes(name: str, arch: int) -> str | None:
    return "e4m3 conversions need compute capability 8.9" if "e4m3" in name and arch < 89 else None


# Eighty codes a head are no multiple of sixteen pairs: Triton then loads them in small pieces.
STACK = {"odd-e4m3": 8}
