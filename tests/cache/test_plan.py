"""The plan of an engine's settings: what a budget that nobody set is, and the clamp."""

from __future__ import annotations

from typing import Any

import pytest

from hemiola.cache.budget import CachePlan
from hemiola.cache.plan import plan_engine
from hemiola.config.engine import EngineConfig
from hemiola.errors import CapacityError
from hemiola.model.specs import KVSpec, StateSpec

KV, STATE = KVSpec(0, 2, 16), StateSpec(1, 40, 3, 4, 8, 10)
BLOCK_BYTES, SLOT_BYTES = 16 * 2 * 2 * 16 * 2, 40 * 3 * 2 + 4 * 8 * 10 * 4


def plan(room: int | None = None, **settings: Any) -> CachePlan:
    config = EngineConfig(**({"cache_bytes": 1 << 20, "max_num_seqs": 4} | settings))
    return plan_engine(config, (KV, STATE, None), max_model_len=64, activation_bytes=2, kv_element_bytes=2, room=room)


def test_snapshots_are_a_quarter_of_the_caches_at_most_eight_per_request() -> None:
    assert (plan().block_bytes, plan().slot_bytes) == (BLOCK_BYTES, SLOT_BYTES)
    assert plan().num_snapshots == 32
    assert plan(cache_bytes=100_000).num_snapshots == 25_000 // SLOT_BYTES
    assert plan(snapshot_bytes=100 * SLOT_BYTES).num_snapshots == 100, "what is asked for has no other limit"
    assert plan(snapshot_bytes=100 * SLOT_BYTES, prefix_caching=False).num_snapshots == 0


def test_room_clamps_caches_and_snapshots_alike_with_a_note() -> None:
    assert plan(room=1 << 30) == plan()
    half = plan(room=60_000, cache_bytes=100_000, snapshot_bytes=20_000)
    assert half.num_snapshots == 10_000 // SLOT_BYTES
    assert half.total_bytes <= 60_000
    (note,) = half.notes
    assert note.startswith("cache_bytes 100,000 + snapshot_bytes 20,000 = 120,000 clamped to 50,000 + 10,000: 60,000")


def test_a_part_of_a_gpus_memory_is_filled() -> None:
    filled = plan(room=100_000, gpu_memory_utilization=0.9, max_num_seqs=1000)
    assert filled.num_snapshots == 20_000 // SLOT_BYTES
    assert 75_000 < filled.total_bytes - filled.num_snapshots * SLOT_BYTES <= 80_000
    own = plan(room=100_000, gpu_memory_utilization=0.9, max_num_seqs=1000, snapshot_bytes=10 * SLOT_BYTES)
    assert own.num_snapshots == 10
    assert 100_000 - 2 * BLOCK_BYTES - 10 * SLOT_BYTES < own.total_bytes <= 100_000
    assert not any(note.startswith("cache_bytes") for note in filled.notes), "nothing was asked for that is not there"
    plain = plan(room=100_000, gpu_memory_utilization=0.9, max_num_seqs=1000, prefix_caching=False)
    assert plain.num_snapshots == 0
    assert 95_000 < plain.total_bytes <= 100_000
    with pytest.raises(CapacityError, match="holds not even one request"):
        plan(room=-1, gpu_memory_utilization=0.1)
