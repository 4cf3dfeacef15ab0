"""Paged KV caches for tests of attention, the exact result in float64, and defects of it.

Runs on any device. Blocks are scattered, everything that no token owns is NaN, and a table's unused entries point far
outside of the cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MARKED = 8
OUTSIDE = -(2**30)  # an entry that nothing may follow


class Paged:
    """Caches of R requests. keys, values: per request (length, Hkv, D) float64, as the cache holds them (e4m3: without
    the scales). k_cache, v_cache, table (R, width), lens: what the kernels take.

    mark: a power of two that multiplies the values of each request's first, middle and last MARKED tokens, so that
    their absence shows.
    """

    def __init__(
        self,
        g: torch.Generator,
        lengths: Sequence[int],
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.bfloat16,
        *,
        block_size: int = 16,
        spare_blocks: int = 3,
        spare_columns: int = 2,
        mark: float = 1.0,
    ) -> None:
        device = g.device
        counts = [-(-length // block_size) for length in lengths]
        num_blocks = sum(counts) + spare_blocks
        shape = (num_blocks, block_size, kv_heads, head_dim)
        free = torch.randperm(num_blocks, generator=g, device=device)
        self.table = torch.full((len(lengths), max(counts, default=0) + spare_columns), OUTSIDE, device=device).int()
        caches = [torch.full(shape, math.nan, device=device) for _ in range(2)]
        held = [torch.randn(shape, generator=g, device=device).to(dtype).float() for _ in range(2)]
        used = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            blocks = free[used : used + count]
            used += count
            self.table[row, :count] = blocks.int()
            tokens = (blocks[:, None] * block_size + torch.arange(block_size, device=device)).flatten()[:length]
            middle = length // 2
            marked = torch.cat([tokens[:MARKED], tokens[middle : middle + MARKED], tokens[-MARKED:]]).unique()
            held[1].view(-1, kv_heads, head_dim)[marked] *= mark
            for cache, values in zip(caches, held, strict=True):
                cache.view(-1, kv_heads, head_dim)[tokens] = values.view(-1, kv_heads, head_dim)[tokens]
            self.keys.append(held[0].view(-1, kv_heads, head_dim)[tokens].double())
            self.values.append(held[1].view(-1, kv_heads, head_dim)[tokens].double())
        self.k_cache, self.v_cache = (cache.to(dtype) for cache in caches)
        self.lens = torch.tensor(lengths, dtype=torch.int32, device=device)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, *, hide: slice | None = None, interleaved: bool = False
) -> Tensor:
    """Exact causal attention of the last n tokens of one request. q: (n, Hq, D); keys, values: (length, Hkv, D).
    Returns (n, Hq, D) float64.

    Defects: hide: tokens that are left out; interleaved: query head j reads KV head j % Hkv.
    """
    n, heads, _ = q.shape
    length, kv_heads, _ = keys.shape
    of_head = torch.arange(heads, device=q.device)
    of_head = of_head % kv_heads if interleaved else of_head // (heads // kv_heads)
    scores = torch.einsum("ihd,jhd->hij", q.double(), keys[:, of_head]) * scale
    hidden = torch.ones(n, length, dtype=torch.bool, device=q.device).triu(length - n + 1)
    if hide is not None:
        hidden[:, hide] = True
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -math.inf).softmax(-1), values[:, of_head])
