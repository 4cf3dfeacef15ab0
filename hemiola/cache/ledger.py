"""Ledger: what each request holds of the caches, and every change of it. Pure bookkeeping; no torch.

A request holds KV blocks (its own and shared ones) and a state slot, or, swapped out, a host copy of both. Whatever has
to be copied is written down in `movements`, in order; who owns the tensors applies them. Each operation that can fail
for want of memory changes nothing when it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile

from hemiola.cache.blocks import BlockPool
from hemiola.cache.budget import CachePlan
from hemiola.cache.movements import Forget, LoadBlocks, LoadState, Movement, SaveBlocks, SaveState
from hemiola.cache.pool import Pool
from hemiola.cache.prefix import Match, PrefixCache, extend_keys
from hemiola.cache.snapshots import Snapshot, SnapshotPool
from hemiola.errors import CapacityError

Tokens = Callable[[int, int], Sequence[int]]


@dataclass(slots=True, eq=False)
class Holding:
    """What one request has of the caches.

    blocks: in order of its tokens. state_slot: -1 for none. keys: chain keys of its full blocks, as far as known.
    match: what the last search for its prefix found, when there were as many tokens and as many changes as in
    `matched_at`.
    num_published: blocks that were made findable. stops: tokens at which a snapshot is to be taken.
    reserved: snapshots that the step under way writes.
    pinned: the snapshot it starts from, until its first step is done. base, rolling: its last fixed snapshot, and the
    one that moves forward with it. swapped: host copies of blocks and state, while it is swapped out.
    """

    owner: str
    blocks: list[int] = field(default_factory=list)
    state_slot: int = -1
    keys: list[bytes] = field(default_factory=list)
    match: Match | None = None
    matched_at: tuple[int, int] = (0, 0)
    num_published: int = 0
    stops: tuple[int, ...] = ()
    reserved: list[Snapshot] = field(default_factory=list)
    pinned: Snapshot | None = None
    base: Snapshot | None = None
    rolling: Snapshot | None = None
    swapped: SwappedOut | None = None


@dataclass(frozen=True, slots=True)
class SwappedOut:
    """Host copies, by number; -1 where the pattern has none of the kind."""

    num_blocks: int
    blocks: int
    state: int
    num_bytes: int


class Ledger:
    def __init__(self, plan: CachePlan, *, prefix_caching: bool, swap_bytes: int) -> None:
        self.plan, self.swap_bytes = plan, swap_bytes
        self.movements: list[Movement] = []
        self.swapped_bytes = 0
        self._host_names = count()
        self.blocks = BlockPool(plan.num_blocks)
        self.slots = Pool("state slot", plan.num_slots)
        self.snapshots = SnapshotPool(
            plan.num_slots, plan.num_snapshots, plan.num_host_snapshots, self.movements, self._host_names
        )
        # With states and no room for a single snapshot nothing could ever be reused.
        enabled = prefix_caching and (plan.slot_bytes == 0 or plan.num_snapshots > 0)
        self.prefix = PrefixCache(self.blocks, self.snapshots, plan.block_size, enabled=enabled)

    def take_movements(self) -> list[Movement]:
        """What was written down since the last call."""
        taken = list(self.movements)
        self.movements.clear()
        return taken

    def find(self, holding: Holding, num_tokens: int, tokens: Tokens) -> Match:
        """The usable prefix of a request with `num_tokens` known tokens; changes no cache. Searched for again only when
        something has changed."""
        now = (num_tokens, self.prefix.version)
        if holding.match is None or holding.matched_at != now:
            if self.prefix.enabled:
                extend_keys(holding.keys, num_tokens, tokens, self.plan.block_size)
            holding.match, holding.matched_at = self.prefix.find(holding.keys, num_tokens), now
        return holding.match

    def admit(self, holding: Holding, match: Match) -> None:
        """Give a request a state slot, the blocks and the state of its prefix, which has just been found.

        Raises: CapacityError.
        """
        holding.state_slot = self.slots.acquire(holding.owner, 1)[0]
        holding.num_published = match.num_tokens // self.plan.block_size
        if self.prefix.has_blocks:
            holding.blocks = [self.blocks[key] for key in holding.keys[: holding.num_published]]
            self.blocks.share(holding.blocks)
        holding.match = None
        holding.rolling = None
        if match.snapshot is not None:
            self.snapshots.pin(match.snapshot)
            self.snapshots.restore(match.snapshot, holding.state_slot)
        holding.pinned = holding.base = match.snapshot

    def extend(self, holding: Holding, num_tokens: int) -> None:
        """Make the blocks cover `num_tokens` tokens. Raises: CapacityError."""
        missing = self.plan.blocks_for(num_tokens) - len(holding.blocks)
        if missing > 0:
            holding.blocks += self.blocks.acquire(missing)

    def reserve(self, holding: Holding, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """The marks of a step that brings tokens start .. end - 1: (tokens from start, state slot) of stops inside."""
        marks = []
        for stop in holding.stops:
            if start < stop < end:
                key = holding.keys[stop // self.plan.block_size - 1]
                if (reserved := self.snapshots.reserve(key, stop, holding.base)) is not None:
                    holding.reserved.append(reserved)
                    marks.append((stop - start, reserved.slot))
        return tuple(marks)

    def unreserve(self, holding: Holding) -> None:
        """The step that should have written a request's marks does not take place."""
        for reserved in holding.reserved:
            self.snapshots.give_back(reserved)
        holding.reserved = []

    def publish(self, holding: Holding, num_computed: int, tokens: Tokens, *, takes_snapshot: bool = True) -> None:
        """A step is done and has written `num_computed` tokens in all: let others find them.

        takes_snapshot: the state is the one after these tokens, and may be kept where a block ends.
        """
        self._unpin(holding)
        if not self.prefix.enabled:
            return
        num_full = num_computed // self.plan.block_size
        if num_full > holding.num_published:
            extend_keys(holding.keys, num_computed, tokens, self.plan.block_size)
            self.prefix.publish(holding.keys[:num_full], holding.blocks, holding.num_published)
            holding.num_published = num_full
        for reserved in holding.reserved:
            reserved.below = holding.base
            holding.base = self.snapshots.publish(reserved)
            holding.base.is_fixed = True
        holding.reserved = []
        if takes_snapshot and self.prefix.has_states and num_full and num_computed % self.plan.block_size == 0:
            self._snapshot(holding, num_computed)

    def release(self, holding: Holding) -> None:
        """Free all that a request holds, wherever it is; a second time does no harm."""
        self._unpin(holding)
        self.unreserve(holding)
        self.blocks.release(holding.blocks)
        self.slots.release(holding.owner)
        if holding.swapped is not None:
            self.movements += [Forget(name) for name in (holding.swapped.blocks, holding.swapped.state) if name >= 0]
            self.swapped_bytes -= holding.swapped.num_bytes
        holding.blocks, holding.state_slot, holding.swapped = [], -1, None
        holding.num_published, holding.base, holding.rolling = 0, None, None

    def surviving_tokens(self, holding: Holding) -> int:
        """Tokens that a request could reuse after giving up all it holds, if everything that nobody else holds were
        lost: memory is short when somebody asks."""
        keys = holding.keys
        if self.prefix.has_blocks:
            shared = takewhile(self.blocks.is_shared, holding.blocks)
            keys = keys[: sum(1 for _ in shared)]
        return self.prefix.find(keys, len(keys) * self.plan.block_size + 1).num_tokens

    def held_bytes(self, holding: Holding) -> int:
        """Of blocks and state: what a swap moves each way."""
        return len(holding.blocks) * self.plan.block_bytes + self.plan.slot_bytes

    def swap_out(self, holding: Holding) -> None:
        """Move blocks and state to the host and free them. Raises: CapacityError beyond swap_bytes."""
        num_bytes = self.held_bytes(holding)
        if self.swapped_bytes + num_bytes > self.swap_bytes:
            raise CapacityError(
                "no host memory left for swapping",
                found=f"{self.swapped_bytes:,} bytes used and {num_bytes:,} more",
                expected=f"at most {self.swap_bytes:,}",
                where=holding.owner,
            )
        blocks = state = -1
        if holding.blocks:
            blocks = next(self._host_names)
            self.movements.append(SaveBlocks(tuple(holding.blocks), blocks))
        if self.plan.slot_bytes:
            state = next(self._host_names)
            self.movements.append(SaveState(holding.state_slot, state))
        swapped = SwappedOut(len(holding.blocks), blocks, state, num_bytes)
        self.release(holding)
        holding.swapped = swapped
        self.swapped_bytes += num_bytes

    def swap_in(self, holding: Holding) -> None:
        """Bring back blocks and state. Raises: CapacityError."""
        swapped = holding.swapped
        assert swapped is not None, f"{holding.owner} is not swapped out"
        blocks = self.blocks.acquire(swapped.num_blocks)
        try:
            holding.state_slot = self.slots.acquire(holding.owner, 1)[0]
        except CapacityError:
            self.blocks.release(blocks)
            raise
        holding.blocks, holding.swapped = blocks, None
        if swapped.blocks >= 0:
            self.movements += [LoadBlocks(swapped.blocks, tuple(blocks)), Forget(swapped.blocks)]
        if swapped.state >= 0:
            self.movements += [LoadState(swapped.state, holding.state_slot), Forget(swapped.state)]
        self.swapped_bytes -= swapped.num_bytes

    def check_integrity(self, holdings: Iterable[Holding]) -> None:
        """Every block, slot, snapshot and swapped byte is accounted for by these holdings. Raises: AssertionError."""
        holdings = list(holdings)
        self.blocks.check_integrity([h.blocks for h in holdings])
        self.slots.check_integrity()
        self.snapshots.check_integrity()
        self.prefix.check_integrity()
        slots = {h.owner: h.state_slot for h in holdings if h.state_slot >= 0}
        assert self.slots.owned() == {owner: [slot] for owner, slot in slots.items()}, "state slots and owners disagree"
        assert self.swapped_bytes == sum(h.swapped.num_bytes for h in holdings if h.swapped), "swapped bytes are lost"
        assert self.swapped_bytes <= self.swap_bytes, "more is swapped out than may be"
        pins = sum(h.pinned is not None for h in holdings)
        assert pins == self.snapshots.num_pins, "a pinned snapshot without a request that reads it"
        reserved = sum(len(h.reserved) for h in holdings)
        assert reserved == self.snapshots.num_reserved, "a reserved snapshot without a request that writes it"
        assert all(not h.blocks and h.state_slot < 0 for h in holdings if h.swapped), "swapped out and still here"

    def _unpin(self, holding: Holding) -> None:
        if holding.pinned is not None:
            self.snapshots.unpin(holding.pinned)
            holding.pinned = None

    def _snapshot(self, holding: Holding, num_tokens: int) -> None:
        key, slot = holding.keys[num_tokens // self.plan.block_size - 1], holding.state_slot
        if num_tokens in holding.stops:
            fixed = self.snapshots.take(key, num_tokens, slot, holding.base)
            if fixed is not None:
                fixed.is_fixed = True
                holding.base = fixed
                holding.rolling = None if fixed is holding.rolling else holding.rolling
        elif (known := self.snapshots.find(key)) is None or known is holding.rolling:
            holding.rolling = self.snapshots.roll(holding.rolling, key, num_tokens, slot, holding.base)
