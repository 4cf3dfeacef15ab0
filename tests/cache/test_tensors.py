"""The mover: every copy is of the right bytes, in the right order, in every dtype."""

from __future__ import annotations

import pytest
import torch

from hemiola.cache.movements import CopyState, Forget, LoadBlocks, LoadState, SaveBlocks, SaveState
from hemiola.cache.tensors import CacheMover
from hemiola.model.specs import KVTensors, LayerCache, StateTensors


def caches(dtype: torch.dtype, kv_dtype: torch.dtype) -> list[LayerCache]:
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    state = StateTensors(random(4, 5, 3, dtype=dtype), random(4, 2, 3, 2, dtype=torch.float32))
    kv = KVTensors(random(6, 4, 2, 3, dtype=kv_dtype), random(6, 4, 2, 3, dtype=kv_dtype))
    return [state, None, kv]


def copies(of: list[LayerCache]) -> list[torch.Tensor]:
    return [tensor.float().clone() for cache in of if cache is not None for tensor in cache]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_every_movement(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    live = caches(dtype, kv_dtype)
    conv, ssm, k, v = copies(live)
    mover = CacheMover(live)
    mover.apply([CopyState(0, 2), SaveState(1, 7), CopyState(3, 1), LoadState(7, 3), SaveBlocks((4, 0), 8)])
    kv = live[2]
    assert isinstance(kv, KVTensors)
    for tensor in kv:
        tensor[[0, 4]] = torch.zeros(2, 4, 2, 3).to(kv_dtype)
    mover.apply([LoadBlocks(8, (1, 5))])
    got = copies(live)
    for after, before in zip(got[:2], (conv, ssm), strict=True):
        assert torch.equal(after, before[[0, 3, 0, 1]])
    for after, before in zip(got[2:], (k, v), strict=True):
        assert torch.equal(after[[1, 5]], before[[4, 0]])
        assert torch.equal(after[[2, 3]], before[[2, 3]])
    assert mover.host_bytes == sum(t[0].nbytes for t in live[0] or ()) + sum(2 * t[0].nbytes for t in kv)
    mover.apply([Forget(7), Forget(8), Forget(8)])
    assert mover.host_bytes == 0
