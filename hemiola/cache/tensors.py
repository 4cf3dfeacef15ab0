"""The cache tensors themselves: one entry per layer, allocated from the model's specs and a plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hemiola.cache.budget import CachePlan
from hemiola.model.specs import KVSpec, KVTensors, LayerCache, StateSpec, StateTensors


def allocate_caches(
    specs: Sequence[KVSpec | StateSpec | None], plan: CachePlan, dtype: torch.dtype, kv_dtype: torch.dtype
) -> list[LayerCache]:
    """Uninitialised tensors: nothing is ever read from a block or slot before its owner has written it."""
    return [_allocate(spec, plan, dtype, kv_dtype) for spec in specs]


def _allocate(
    spec: KVSpec | StateSpec | None, plan: CachePlan, dtype: torch.dtype, kv_dtype: torch.dtype
) -> LayerCache:
    if isinstance(spec, KVSpec):
        shape = (plan.num_blocks, plan.block_size, spec.kv_heads, spec.head_dim)
        return KVTensors(torch.empty(shape, dtype=kv_dtype), torch.empty(shape, dtype=kv_dtype))
    if isinstance(spec, StateSpec):
        conv = torch.empty(plan.num_slots, spec.conv_dim, spec.conv_history, dtype=dtype)
        ssm = torch.empty(plan.num_slots, spec.num_heads, spec.head_dim, spec.state_size, dtype=torch.float32)
        return StateTensors(conv, ssm)
    return None
