"""EngineStats: what an engine has done so far and what its caches hold now, as numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hemiola.cache.prefix import PrefixTotals
from hemiola.cache.snapshots import SnapshotCounts
from hemiola.engine.preemption import PreemptionCounts
from hemiola.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the start (steps, tokens, prefix, snapshots, preemptions) and the state of the pools now.

    blocks_idle: free blocks whose content can still be reused are among blocks_free.
    """

    num_steps: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_waiting: int
    num_running: int
    prefix: PrefixTotals
    preemptions: PreemptionCounts
    snapshots: SnapshotCounts
    blocks_total: int
    blocks_free: int
    blocks_published: int
    blocks_evicted: int
    slots_total: int
    slots_free: int
    snapshots_held: int
    snapshot_bytes_held: int
    snapshot_bytes_budget: int
    snapshots_on_host: int
    host_snapshot_bytes_held: int
    swapped_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and texts, for JSON."""
        values = asdict(self)
        for name in ("misses", "tokens_missed"):
            values["prefix"][name] = {reason.value: count for reason, count in values["prefix"][name].items()}
        recent = [dict(decision, kind=decision["kind"].value) for decision in values["preemptions"]["recent"]]
        values["preemptions"]["recent"] = recent
        return values


def read_stats(scheduler: Scheduler, *, num_steps: int, num_prefill_tokens: int, num_decode_tokens: int) -> EngineStats:
    plan, ledger = scheduler.plan, scheduler.ledger
    snapshots = ledger.snapshots
    return EngineStats(
        num_steps=num_steps,
        num_prefill_tokens=num_prefill_tokens,
        num_decode_tokens=num_decode_tokens,
        num_waiting=len(scheduler.waiting),
        num_running=len(scheduler.running),
        prefix=ledger.prefix.totals,
        preemptions=scheduler.preemptions,
        snapshots=snapshots.counts,
        blocks_total=ledger.blocks.size,
        blocks_free=ledger.blocks.num_free,
        blocks_published=ledger.blocks.num_published,
        blocks_evicted=ledger.blocks.num_evicted,
        slots_total=ledger.slots.size,
        slots_free=ledger.slots.num_free,
        snapshots_held=snapshots.num_held,
        snapshot_bytes_held=snapshots.num_held * plan.slot_bytes,
        snapshot_bytes_budget=snapshots.size * plan.slot_bytes,
        snapshots_on_host=snapshots.num_on_host,
        host_snapshot_bytes_held=snapshots.num_on_host * plan.slot_bytes,
        swapped_bytes=ledger.swapped_bytes,
    )
