"""Writing keys and values: places, padded rows, and the fp8 codes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hemiola.ops.kv_write import kv_write
from tests.support.numerics import generator, randn
from tests.support.weights import e4m3_nearest

BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM = 5, 4, 2, 8


def poisoned(dtype: torch.dtype) -> Tensor:
    return torch.full((BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM), float("nan")).to(dtype)


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_token_lands_in_its_slot_and_nowhere_else(dtype: torch.dtype) -> None:
    g = generator(0)
    k, v = randn(g, 4, KV_HEADS, HEAD_DIM, dtype=dtype), randn(g, 4, KV_HEADS, HEAD_DIM, dtype=dtype)
    k_cache, v_cache = poisoned(dtype), poisoned(dtype)
    slots = [17, 3, -1, 8]
    kv_write(k, v, k_cache, v_cache, torch.tensor(slots), 3.0, 5.0)  # the scales are unused without fp8
    for new, cache in ((k, k_cache), (v, v_cache)):
        for slot in range(BLOCKS * BLOCK_SIZE):
            stored = cache[slot // BLOCK_SIZE, slot % BLOCK_SIZE]
            if slot in slots:
                assert torch.equal(stored, new[slots.index(slot)])
            else:
                assert stored.isnan().all()


def test_fp8_codes_are_divided_by_their_own_scale_and_saturate() -> None:
    g = generator(1)
    k, v = randn(g, 6, KV_HEADS, HEAD_DIM), randn(g, 6, KV_HEADS, HEAD_DIM)
    k[0, 0, 0], v[1, 0, 0] = 1e6, -1e6
    k_cache, v_cache = poisoned(torch.float8_e4m3fn), poisoned(torch.float8_e4m3fn)
    kv_write(k, v, k_cache, v_cache, torch.tensor([0, 1, 2, 3, 19, -1]), 0.5, 0.03)
    for new, cache, scale in ((k, k_cache, 0.5), (v, v_cache, 0.03)):
        flat = cache.float().flatten(0, 1)
        expected = e4m3_nearest((new[:5] / torch.tensor(scale)).double())
        assert torch.equal(flat[[0, 1, 2, 3, 19]].double(), expected)
        assert expected.abs().max() == 448
        assert flat[4:19].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_padded_rows_write_nothing(dtype: torch.dtype) -> None:
    k_cache, v_cache = poisoned(dtype), poisoned(dtype)
    before = bits(k_cache).clone(), bits(v_cache).clone()
    new = torch.ones(3, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    kv_write(new, new, k_cache, v_cache, torch.tensor([-1, -1, -1]), 1.0, 1.0)
    assert torch.equal(bits(k_cache), before[0])
    assert torch.equal(bits(v_cache), before[1])


def test_a_cache_that_cannot_be_written_in_place_is_refused() -> None:
    """A transposed cache would flatten into a copy, and the write would be lost."""
    cache = torch.zeros(BLOCK_SIZE, BLOCKS, KV_HEADS, HEAD_DIM).transpose(0, 1)
    new = torch.ones(1, KV_HEADS, HEAD_DIM)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        kv_write(new, new, cache, cache, torch.tensor([0]), 1.0, 1.0)
