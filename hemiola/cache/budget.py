"""How many KV blocks and state slots a byte budget buys, with the arithmetic in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hemiola.errors import CapacityError
from hemiola.model.specs import KVSpec, StateSpec

SSM_BYTES = 4  # the SSM state is float32 in every mode


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Counts and sizes of the two pools. A pattern without attention has no blocks (block_bytes 0), one without mamba
    layers has slots of 0 bytes that only bound the number of running requests.

    num_snapshots: state slots beyond the requests' own, for snapshots. num_host_snapshots: places for them on the host.
    notes: one sentence per setting that was clamped.
    """

    num_blocks: int
    block_bytes: int
    block_size: int
    num_slots: int
    slot_bytes: int
    num_snapshots: int
    num_host_snapshots: int
    notes: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """On the device."""
        return self.num_blocks * self.block_bytes + (self.num_slots + self.num_snapshots) * self.slot_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """KV blocks that a request of `num_tokens` needs."""
        return -(-num_tokens // self.block_size) if self.block_bytes else 0


def plan_caches(
    specs: Sequence[KVSpec | StateSpec | None],
    *,
    budget_bytes: int,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
    activation_bytes: int,
    kv_element_bytes: int,
    prefix_caching: bool,
    snapshot_bytes: int,
    host_snapshot_bytes: int,
    max_snapshots: int | None,
) -> CachePlan:
    """Split a budget: state slots first, up to max_num_seqs and (with attention present) half of the budget or what a
    single KV block leaves, then KV blocks, as many as the slots' requests could ever use, and with prefix caching as
    many again for prefixes that nobody holds. Snapshots come out of their own budgets, max_snapshots at most.

    Raises: CapacityError when not even one request's state and one block fit.
    """
    states = [spec for spec in specs if isinstance(spec, StateSpec)]
    slot_bytes = sum(s.conv_elements * activation_bytes + s.ssm_elements * SSM_BYTES for s in states)
    per_token = sum(spec.elements_per_token for spec in specs if isinstance(spec, KVSpec)) * kv_element_bytes
    block_bytes = per_token * block_size
    if slot_bytes + block_bytes > budget_bytes:
        raise CapacityError(
            f"the cache budget holds not even one request: a state slot takes {slot_bytes:,} bytes and a KV block of "
            f"{block_size} tokens {block_bytes:,}",
            found=f"{budget_bytes:,} bytes",
            expected=f"at least {slot_bytes + block_bytes:,}",
            where="cache_bytes",
            remedy="Raise the cache budget.",
        )
    notes = []
    num_slots = max_num_seqs
    if slot_bytes:
        for_states = min(budget_bytes // 2, budget_bytes - block_bytes) if block_bytes else budget_bytes
        num_slots = max(1, min(max_num_seqs, for_states // slot_bytes))
    if num_slots < max_num_seqs:
        notes.append(
            f"max_num_seqs {max_num_seqs} clamped to {num_slots}: a request's recurrent state takes {slot_bytes:,} "
            f"bytes, of the cache budget of {budget_bytes:,} bytes {for_states:,} go to states"
        )
    num_blocks = 0
    if block_bytes:
        affordable = (budget_bytes - num_slots * slot_bytes) // block_bytes
        num_blocks = min(affordable, num_slots * -(-max_model_len // block_size) * (2 if prefix_caching else 1))
    num_snapshots = num_host_snapshots = 0
    if slot_bytes and prefix_caching:
        num_snapshots, num_host_snapshots = snapshot_bytes // slot_bytes, host_snapshot_bytes // slot_bytes
        if max_snapshots is not None:
            num_snapshots = min(num_snapshots, max_snapshots)
        if not num_snapshots:
            notes.append(
                f"no prefix is reused: a state snapshot takes {slot_bytes:,} bytes, and snapshot_bytes is "
                f"{snapshot_bytes:,}"
            )
            num_host_snapshots = 0
    return CachePlan(
        num_blocks, block_bytes, block_size, num_slots, slot_bytes, num_snapshots, num_host_snapshots, tuple(notes)
    )
