"""KV writes on small shapes: the same bytes as the reference, and nothing else touched."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hemiola.kernels.kv_write import kv_write
from hemiola.ops.kv_write import kv_write as reference
from tests.support.numerics import generator, randn

SLOTS = [17, -1, 3, 95, -1, 0, 40]


def bits(cache: Tensor) -> Tensor:
    return cache.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("kv_heads", "head_dim", "block_size"), [(2, 128, 16), (3, 40, 8), (1, 32, 32)])
def test_same_bytes_as_the_reference(kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    g = generator(head_dim)
    wide = randn(g, len(SLOTS), 3, kv_heads, head_dim) * 100
    wide[0, :, 0, :4] = torch.tensor([math.nan, math.inf, -math.inf, 1e6])
    _, k, v = wide.bfloat16().unbind(1)
    slots = torch.tensor(SLOTS)
    poison = torch.full((96 // block_size, block_size, kv_heads, head_dim), 7.0).to(dtype)
    ours, theirs = ((poison.clone(), poison.clone()) for _ in range(2))
    kv_write(k, v, *ours, slots, 0.37, 1.9)
    reference(k, v, *theirs, slots, 0.37, 1.9)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(bits(a), bits(b))
    assert not torch.equal(bits(ours[0]), bits(ours[1]))


def test_no_tokens() -> None:
    cache = torch.zeros(1, 16, 1, 32, dtype=torch.bfloat16)
    nothing = torch.zeros(0, 1, 32, dtype=torch.bfloat16)
    kv_write(nothing, nothing, cache, cache, torch.zeros(0, dtype=torch.int64), 1.0, 1.0)
    assert cache.eq(0).all()
