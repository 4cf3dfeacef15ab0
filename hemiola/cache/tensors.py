"""The cache tensors themselves: one entry per layer, allocated from the model's specs and a plan, and their copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hemiola.cache.budget import CachePlan
from hemiola.cache.movements import CopyState, Forget, LoadBlocks, LoadState, Movement, SaveBlocks, SaveState
from hemiola.model.specs import KVSpec, KVTensors, LayerCache, StateSpec, StateTensors


def allocate_caches(
    specs: Sequence[KVSpec | StateSpec | None],
    plan: CachePlan,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> list[LayerCache]:
    """Uninitialised tensors: nothing is ever read from a block or slot before its owner has written it. The slots of
    snapshots come after those of requests."""
    return [_allocate(spec, plan, dtype, kv_dtype, device) for spec in specs]


def _allocate(
    spec: KVSpec | StateSpec | None,
    plan: CachePlan,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device | str,
) -> LayerCache:
    if isinstance(spec, KVSpec):
        shape = (plan.num_blocks, plan.block_size, spec.kv_heads, spec.head_dim)
        k, v = (torch.empty(shape, dtype=kv_dtype, device=device) for _ in range(2))
        return KVTensors(k, v)
    if isinstance(spec, StateSpec):
        slots = plan.num_slots + plan.num_snapshots
        conv = torch.empty(slots, spec.conv_dim, spec.conv_history, dtype=dtype, device=device)
        ssm = torch.empty(slots, spec.num_heads, spec.head_dim, spec.state_size, dtype=torch.float32, device=device)
        return StateTensors(conv, ssm)
    return None


class CacheMover:
    """Applies the ledger's movements to one engine's cache tensors, and keeps the host copies. Copies are of bytes."""

    def __init__(self, caches: Sequence[LayerCache]) -> None:
        self._states = [_bytes(t) for cache in caches if isinstance(cache, StateTensors) for t in cache]
        self._kv = [_bytes(t) for cache in caches if isinstance(cache, KVTensors) for t in cache]
        self._host: dict[int, list[torch.Tensor]] = {}

    @property
    def host_bytes(self) -> int:
        return sum(tensor.nbytes for copies in self._host.values() for tensor in copies)

    def apply(self, movements: Iterable[Movement]) -> None:
        """In order, after all that the engine has computed so far."""
        for movement in movements:
            match movement:
                case CopyState(source, target):
                    for state in self._states:
                        state[target] = state[source]
                case SaveState(slot, host):
                    self._host[host] = [state[slot].to("cpu", copy=True) for state in self._states]
                case LoadState(host, slot):
                    for state, copy in zip(self._states, self._host[host], strict=True):
                        state[slot] = copy
                case SaveBlocks(blocks, host):
                    self._host[host] = [kv[list(blocks)].to("cpu") for kv in self._kv]
                case LoadBlocks(host, blocks):
                    for kv, copy in zip(self._kv, self._host[host], strict=True):
                        kv[list(blocks)] = copy.to(kv.device)
                case Forget(host):
                    self._host.pop(host, None)

    def forget_all(self) -> None:
        """Give back all host memory."""
        self._host.clear()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as (pieces, bytes)."""
    return tensor.view(torch.uint8).flatten(1) if tensor.numel() else tensor.view(torch.uint8).reshape(len(tensor), 0)
