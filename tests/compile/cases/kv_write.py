"""KV writes of contiguous and of sliced keys and values, into both cache types."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels.kv_write import kv_write


def write(tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype, width: int = 1) -> object:
    cache = torch.empty(1000, 16, kv_heads, head_dim, dtype=dtype, device="meta")
    k, v = torch.empty(2, tokens, kv_heads * width, head_dim, dtype=torch.bfloat16, device="meta")[:, :, :kv_heads]
    return kv_write(k, v, cache, cache, torch.empty(tokens, dtype=torch.int64, device="meta"), 0.5, 2.0)


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    for kind, dtype in (("bf16", torch.bfloat16), ("e4m3", torch.float8_e4m3fn)):
        yield f"lightning-{kind}", partial(write, 256, 2, 128, dtype)
        yield f"odd-{kind}", partial(write, 7, 3, 40, dtype, width=3)


def excludes(name: str, arch: int) -> str | None:
    return "e4m3 conversions need compute capability 8.9" if "e4m3" in name and arch < 89 else None
