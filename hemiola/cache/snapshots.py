"""State snapshots: copies of a request's recurrent state at chosen tokens, in slots of their own. Pure bookkeeping.

A full pool gives up the snapshot of least value, and only for one of more value. Value is what a snapshot is expected
to save per byte it holds:

    tokens saved x (1 + hits) x 2^-(age / size) / bytes

Tokens saved are those since the next snapshot below it on the same prefix that is still held; age counts fixed
snapshots asked for and hits since its last use, so that an unused one halves with every turnover of the pool. All
snapshots of a model have the same bytes, which therefore cancel. What the device pool gives up moves to host memory
when there is a host tier, under the same rule; a hit there is loaded from there.

A running request keeps one more snapshot beside its fixed ones, which rolls forward with it until the request ends.
Its value is counted like any other's, but neither rolling nor asking for a place to begin makes others older, however
long an answer gets: what an idle conversation left behind does not give way to something that is worth less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from math import log2

from hemiola.cache.movements import CopyState, Forget, LoadState, Movement, SaveState


@dataclass(slots=True, eq=False)
class Snapshot:
    """State after `num_tokens` tokens whose chain key is `key`. It lies in a state slot or, with slot -1, on the host.

    below: the next shorter snapshot of the same prefix when it was taken. pins: requests that are about to read it.
    is_fixed: it stays at its place; another one may be rolled forward to a later token by the request that took it.
    """

    key: bytes
    num_tokens: int
    slot: int
    below: Snapshot | None
    last_used: int
    host: int = -1
    hits: int = 0
    pins: int = 0
    is_fixed: bool = False
    is_held: bool = True

    @property
    def tokens_saved(self) -> int:
        while self.below is not None and not self.below.is_held:
            self.below = self.below.below
        return self.num_tokens - (self.below.num_tokens if self.below else 0)


@dataclass(slots=True)
class SnapshotCounts:
    """Events since the start. refused: no place for one of so little value."""

    taken: int = 0
    rolled: int = 0
    refused: int = 0
    evicted: int = 0
    to_host: int = 0
    hits: int = 0
    host_hits: int = 0


_Heap = list[tuple[float, int, Snapshot]]


@dataclass(slots=True)
class SnapshotPool:
    """Slots first_slot .. first_slot + size - 1 of the state tensors, and `host_size` places on the host.

    movements: where copies are written down; host_names: numbers for host copies. on_evict: told the key of each
    snapshot that is gone for want of room. version: grows whenever there is another set of snapshots to be found.
    """

    first_slot: int
    size: int
    host_size: int
    movements: list[Movement]
    host_names: Iterator[int]
    on_evict: Callable[[bytes], None] = lambda key: None
    counts: SnapshotCounts = field(default_factory=SnapshotCounts)
    version: int = 0
    _free: list[int] = field(init=False)
    _held: dict[bytes, Snapshot] = field(default_factory=dict)
    # By value when ranked, which is no more than now; one heap for the device, one for the host.
    _heaps: tuple[_Heap, _Heap] = field(default_factory=lambda: ([], []))
    _serials: Iterator[int] = field(default_factory=count)
    _reserved: set[int] = field(default_factory=set)
    _num_on_host: int = 0
    _clock: int = 0

    def __post_init__(self) -> None:
        self._free = list(range(self.first_slot + self.size - 1, self.first_slot - 1, -1))

    @property
    def num_held(self) -> int:
        """In state slots."""
        return self.size - len(self._free) - len(self._reserved)

    @property
    def num_reserved(self) -> int:
        return len(self._reserved)

    @property
    def num_pins(self) -> int:
        return sum(snapshot.pins for snapshot in self._held.values())

    @property
    def num_on_host(self) -> int:
        return self._num_on_host

    def find(self, key: bytes) -> Snapshot | None:
        return self._held.get(key)

    def find_last(self, keys: Sequence[bytes]) -> Snapshot | None:
        """Of the last of these keys that has one."""
        key = next(filter(self._held.__contains__, reversed(keys)), None)
        return None if key is None else self._held[key]

    def held_keys(self) -> Iterable[bytes]:
        return self._held.keys()

    def pin(self, snapshot: Snapshot) -> None:
        """A request is about to read it: it stays until `unpin`, and counts as used."""
        snapshot.pins += 1
        snapshot.hits += 1
        snapshot.is_fixed = True
        self.counts.hits += 1
        self.counts.host_hits += snapshot.slot < 0
        self._clock += 1
        snapshot.last_used = self._clock

    def unpin(self, snapshot: Snapshot) -> None:
        assert snapshot.pins > 0, "a snapshot is unpinned and nobody pins it"
        snapshot.pins -= 1

    def restore(self, snapshot: Snapshot, slot: int) -> None:
        """Write down the copy of a snapshot into a request's state slot."""
        on_host = snapshot.slot < 0
        self.movements.append(LoadState(snapshot.host, slot) if on_host else CopyState(snapshot.slot, slot))

    def take(self, key: bytes, num_tokens: int, slot: int, below: Snapshot | None) -> Snapshot | None:
        """Copy a request's state slot; the snapshot with this key, old or new, or None: no place for it."""
        if (known := self._held.get(key)) is not None:
            return known
        self._clock += 1
        return self._take(key, num_tokens, slot, below)

    def reserve(self, key: bytes, num_tokens: int, below: Snapshot | None) -> Snapshot | None:
        """A place for a state that the coming step writes; nobody finds it before `publish`. None when there is no
        place, or when there is such a snapshot already."""
        if key in self._held:
            return None
        self._clock += 1
        new = Snapshot(key, num_tokens, -1, below, self._clock, is_fixed=True, is_held=False)
        if not self._find_place(new):
            return None
        self._reserved.add(new.slot)
        return new

    def publish(self, reserved: Snapshot) -> Snapshot:
        """Its state is written: let it be found. Returns the snapshot with this key, which may be an earlier one."""
        if (known := self._held.get(reserved.key)) is not None:
            self.give_back(reserved)
            return known
        self._reserved.remove(reserved.slot)
        reserved.is_held = True
        self._hold(reserved)
        return reserved

    def give_back(self, reserved: Snapshot) -> None:
        """Its state will not be written."""
        self._reserved.remove(reserved.slot)
        self._free.append(reserved.slot)

    def roll(
        self, old: Snapshot | None, key: bytes, num_tokens: int, slot: int, below: Snapshot | None
    ) -> Snapshot | None:
        """Like `take`, instead of `old` where that one is held and not fixed: in its slot, or for its place on the
        host."""
        if (known := self._held.get(key)) is not None:
            return known
        if old is None or not old.is_held or old.is_fixed:
            return self._take(key, num_tokens, slot, below)
        if old.slot < 0:
            new = self._take(key, num_tokens, slot, below)
            if new is not None:
                self.drop(old.key)
            return new
        del self._held[old.key]
        value = self.value(old)
        old.key, old.num_tokens, old.below, old.last_used = key, num_tokens, below, self._clock
        self._held[key] = old
        if self.value(old) < value:
            self._rank(old)
        self.version += 1
        self.counts.rolled += 1
        self.movements.append(CopyState(slot, old.slot))
        return old

    def drop(self, key: bytes) -> None:
        """Give up a snapshot that can no longer be used, if there is one."""
        snapshot = self._held.pop(key, None)
        if snapshot is None:
            return
        assert snapshot.pins == 0, "a snapshot is dropped while a request is about to read it"
        snapshot.is_held = False
        self.version += 1
        if snapshot.slot >= 0:
            self._free.append(snapshot.slot)
        else:
            self._num_on_host -= 1
            self.movements.append(Forget(snapshot.host))

    def value(self, snapshot: Snapshot) -> float:
        """log2 of it, but for what the present time takes from all alike. It grows with use and when something below is
        given up, and falls only when one rolls past a new fixed one."""
        used = snapshot.last_used / (self.size + self.host_size)
        return log2(snapshot.tokens_saved * (1 + snapshot.hits)) + used

    def check_integrity(self) -> None:
        """Every slot is free, reserved or holds one snapshot. Raises: AssertionError."""
        slots = [s.slot for s in self._held.values() if s.slot >= 0]
        everything = sorted([*slots, *self._free, *self._reserved])
        assert everything == list(range(self.first_slot, self.first_slot + self.size)), "a snapshot slot is lost"
        assert self._num_on_host == len(self._held) - len(slots) <= self.host_size, "host snapshots are miscounted"
        assert all(s.is_held and s.key == key for key, s in self._held.items()), "a snapshot under a wrong key"

    def _take(self, key: bytes, num_tokens: int, slot: int, below: Snapshot | None) -> Snapshot | None:
        new = Snapshot(key, num_tokens, -1, below, self._clock)
        if not self._find_place(new):
            return None
        self._hold(new)
        self.movements.append(CopyState(slot, new.slot))
        return new

    def _hold(self, new: Snapshot) -> None:
        self._held[new.key] = new
        self._rank(new)
        self.version += 1
        self.counts.taken += 1

    def _find_place(self, new: Snapshot) -> bool:
        """Give it a slot that is free, or made so."""
        if not self._free and not self._make_room(new):
            self.counts.refused += 1
            return False
        new.slot = self._free.pop()
        return True

    def _make_room(self, new: Snapshot) -> bool:
        """Free one slot, if the least valuable snapshot there is worth less than `new`."""
        least = self._least(on_host=False)
        if least is None or self.value(least) >= self.value(new):
            return False
        slot = least.slot
        if self.host_size and self._host_room(least):
            least.slot, least.host = -1, next(self.host_names)
            self._rank(least)
            self._num_on_host += 1
            self.counts.to_host += 1
            self.movements.append(SaveState(slot, least.host))
            self._free.append(slot)
        else:
            self._evict(least)
        return True

    def _host_room(self, incoming: Snapshot) -> bool:
        if self._num_on_host < self.host_size:
            return True
        least = self._least(on_host=True)
        if least is None or self.value(least) >= self.value(incoming):
            return False
        self._evict(least)
        return True

    def _rank(self, snapshot: Snapshot) -> None:
        on_host = snapshot.slot < 0
        heap = self._heaps[on_host]
        if len(heap) < 2 * (self.size + self.host_size):
            heappush(heap, (self.value(snapshot), next(self._serials), snapshot))
        else:  # most of them are gone
            there = [s for s in self._held.values() if _is_there(s, on_host)]
            heap[:] = [(self.value(s), next(self._serials), s) for s in there]
            heapify(heap)

    def _least(self, *, on_host: bool) -> Snapshot | None:
        """The least valuable one there that nobody is about to read."""
        heap, pinned, least = self._heaps[on_host], [], None
        while heap and least is None:
            value, serial, snapshot = heap[0]
            if not _is_there(snapshot, on_host):
                heappop(heap)
            elif (now := self.value(snapshot)) > value:
                heapreplace(heap, (now, serial, snapshot))
            elif snapshot.pins:
                pinned.append(heappop(heap))
            else:
                least = snapshot
        for entry in pinned:
            heappush(heap, entry)
        return least

    def _evict(self, snapshot: Snapshot) -> None:
        self.counts.evicted += 1
        self.drop(snapshot.key)
        self.on_evict(snapshot.key)


def _is_there(snapshot: Snapshot, on_host: bool) -> bool:
    return snapshot.is_held and (snapshot.slot < 0) == on_host
