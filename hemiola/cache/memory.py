"""MemoryBudget: where an engine's memory goes, row by row, and the clamp of its caches to what the machine has."""

from __future__ import annotations

from dataclasses import dataclass

from hemiola.cache.budget import CachePlan
from hemiola.config.model import LayerKind, NemotronHConfig

SNAPSHOTS_PER_REQUEST = 8  # what a snapshot budget that nobody set is bounded by


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """num_bytes: allocated at the start, or the most that may be (is_limit). detail: the arithmetic, in words."""

    name: str
    num_bytes: int
    detail: str
    is_limit: bool = False


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """available_bytes: what the machine could give when the engine was made."""

    rows: tuple[MemoryRow, ...]
    available_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(row.num_bytes for row in self.rows)


def clamp_cache_bytes(cache_bytes: int, snapshot_bytes: int, room: int) -> tuple[int, int, tuple[str, ...]]:
    """Cache and snapshot budgets that fit `room` bytes, and a note when they had to shrink, each by the same factor."""
    wanted = cache_bytes + snapshot_bytes
    if wanted <= room:
        return cache_bytes, snapshot_bytes, ()
    room = max(room, 0)
    caches = room * cache_bytes // wanted
    note = (
        f"cache_bytes {cache_bytes:,} + snapshot_bytes {snapshot_bytes:,} = {wanted:,} clamped to {caches:,} + "
        f"{room - caches:,}: {room:,} bytes of memory are available beside weights and workspace"
    )
    return caches, room - caches, (note,)


def memory_rows(
    plan: CachePlan,
    *,
    weight_bytes: int,
    expanded_bytes: int,
    workspace_bytes: int,
    swap_bytes: int,
    graph_bytes: int = 0,
) -> tuple[MemoryRow, ...]:
    slots = f"{plan.slot_bytes:,} bytes"
    return (
        MemoryRow("weights", weight_bytes, "as stored"),
        MemoryRow("expanded weights", expanded_bytes, "kept by the reference arm, as used", is_limit=True),
        MemoryRow(
            "KV blocks",
            plan.num_blocks * plan.block_bytes,
            f"{plan.num_blocks:,} blocks of {plan.block_size} tokens and {plan.block_bytes:,} bytes",
        ),
        MemoryRow("states", plan.num_slots * plan.slot_bytes, f"{plan.num_slots:,} requests of {slots}"),
        MemoryRow("snapshots", plan.num_snapshots * plan.slot_bytes, f"{plan.num_snapshots:,} of {slots}"),
        MemoryRow(
            "snapshots on the host",
            plan.num_host_snapshots * plan.slot_bytes,
            f"{plan.num_host_snapshots:,} of {slots}",
            is_limit=True,
        ),
        MemoryRow("swapped requests", swap_bytes, "KV and states of preempted requests", is_limit=True),
        MemoryRow("workspace", workspace_bytes, "activations and logits of one step, estimated", is_limit=True),
        MemoryRow("graphs", graph_bytes, "CUDA graphs of decode steps, set aside", is_limit=True),
    )


def estimate_workspace(config: NemotronHConfig, num_tokens: int, num_requests: int) -> int:
    """Bytes of one step's float32 activations, roughly: four residual-sized tensors and three of the widest inner size
    per token, and the logits of every request."""
    mlp = max(config.mlp_intermediate_sizes, default=0)
    experts = config.num_experts_per_tok * config.moe_intermediate_size + config.shared_intermediate_size
    mamba = config.in_proj_size if config.count(LayerKind.MAMBA) else 0
    return 4 * (num_tokens * (4 * config.hidden_size + 3 * max(mlp, experts, mamba)) + num_requests * config.vocab_size)
