"""The cache plan that an engine's settings ask for: the engine's own, and a simulation's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hemiola.cache.budget import CachePlan, plan_caches
from hemiola.cache.memory import SNAPSHOTS_PER_REQUEST, clamp_cache_bytes
from hemiola.config.engine import EngineConfig
from hemiola.model.specs import KVSpec, StateSpec


def plan_engine(
    config: EngineConfig,
    specs: Sequence[KVSpec | StateSpec | None],
    *,
    max_model_len: int,
    activation_bytes: int,
    kv_element_bytes: int,
    room: int | None = None,
) -> CachePlan:
    """specs: what each layer keeps. activation_bytes, kv_element_bytes: per number. room: bytes of memory that there
    are for caches and snapshots, which are clamped to it with a note, or fill it with gpu_memory_utilization; None for
    no limit.

    Raises: CapacityError when not even one request fits.
    """
    cache_bytes, notes = config.cache_bytes, tuple[str, ...]()
    snapshot_bytes, max_snapshots = config.snapshot_bytes, None
    if config.gpu_memory_utilization is not None and room is not None:
        room = max(room, 0)
        if not config.prefix_caching:
            snapshot_bytes = 0
        cache_bytes = room * 4 // 5 if snapshot_bytes is None else max(0, room - snapshot_bytes)
    if snapshot_bytes is None:
        snapshot_bytes, max_snapshots = cache_bytes // 4, SNAPSHOTS_PER_REQUEST * config.max_num_seqs
    if room is not None:
        cache_bytes, snapshot_bytes, notes = clamp_cache_bytes(cache_bytes, snapshot_bytes, room)
    plan = plan_caches(
        specs,
        budget_bytes=cache_bytes,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        activation_bytes=activation_bytes,
        kv_element_bytes=kv_element_bytes,
        prefix_caching=config.prefix_caching,
        snapshot_bytes=snapshot_bytes,
        host_snapshot_bytes=config.host_snapshot_bytes,
        max_snapshots=max_snapshots,
    )
    return replace(plan, notes=(*notes, *plan.notes))
