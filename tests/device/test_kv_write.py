"""KV writes on the GPU: the reference's bytes, at real and odd shapes and far into a large cache."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hemiola.kernels.kv_write import kv_write
from hemiola.ops.device.kv_write import unsupported
from hemiola.ops.kv_write import kv_write as reference

E4M3 = torch.float8_e4m3fn


def bits(cache: Tensor) -> Tensor:
    return cache.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
@pytest.mark.parametrize("tokens", [1, 7, 256, 8192])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 128), (8, 128), (3, 40), (1, 32)])
def test_same_bytes_as_the_reference(tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    g = torch.Generator("cuda").manual_seed(tokens)
    wide = torch.randn(tokens, 3, kv_heads, head_dim, generator=g, device="cuda") * 200
    wide[0, :, 0, :4] = torch.tensor([math.nan, math.inf, -math.inf, 1e6])
    _, k, v = wide.bfloat16().unbind(1)
    blocks = tokens // 16 + 3
    slots = torch.randperm(blocks * 16, generator=g, device="cuda")[:tokens]
    slots[torch.rand(tokens, generator=g, device="cuda") < 0.2] = -1
    poison = torch.full((blocks, 16, kv_heads, head_dim), 7.0, device="cuda").to(dtype)
    ours, theirs, unscaled = ((poison.clone(), poison.clone()) for _ in range(3))
    assert unsupported(k, v, *ours, slots, 0.37, 1.9) is None
    kv_write(k, v, *ours, slots, 0.37, 1.9)
    reference(k, v, *theirs, slots, 0.37, 1.9)
    reference(k, v, *unscaled, slots, 1.9, 0.37)
    for a, b, c in zip(ours, theirs, unscaled, strict=True):
        assert torch.equal(bits(a), bits(b))
        assert dtype != E4M3 or slots.max() < 0 or not torch.equal(bits(a), bits(c)), "the scales do not show"


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_slots_beyond_two_to_the_31_elements(dtype: torch.dtype) -> None:
    k, v = torch.randn(2, 3, 2, 128, device="cuda").bfloat16()
    far = 2**31 // (16 * 2 * 128) + 1
    k_cache, v_cache = (torch.zeros(far + 2, 16, 2, 128, dtype=dtype, device="cuda") for _ in range(2))
    kv_write(k, v, k_cache, v_cache, torch.tensor([far * 16 + 5, -1, 3], device="cuda"), 1.0, 1.0)
    for new, cache in ((k, k_cache), (v, v_cache)):
        assert torch.equal(bits(cache[far, 5]), bits(new[0].to(dtype)))
        assert torch.equal(bits(cache[0, 3]), bits(new[2].to(dtype)))
        assert (
            cache.view(torch.uint8).count_nonzero()
            == bits(cache[far, 5]).count_nonzero() + bits(cache[0, 3]).count_nonzero()
        ), "something else was written"
