"""Prefix cache: which beginnings of a prompt need not be computed again, and why not more of them.

A block of tokens is known by its chain key: a 128-bit hash of the key before it and its own ids, so that equal keys
mean equal beginnings. A prefix is usable when its KV blocks are all there *and* a state snapshot lies at its end; a
pattern without attention needs the snapshot alone, one without mamba layers the blocks alone. When a block goes,
everything that builds on it goes with it, snapshots included: what cannot be used is not kept.
"""

from __future__ import annotations

import enum
import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from hemiola.cache.blocks import BlockPool
from hemiola.cache.snapshots import Snapshot, SnapshotPool

ROOT = bytes(16)
REMEMBERED = 1 << 14  # keys of what was given up, and of what a pattern without KV has seen


class MissReason(enum.Enum):
    """Why a prompt's whole beginning was not reused.

    no_kv: nobody has computed it, or it is still being computed. no_state: its KV is there and no snapshot is at its
    end. evicted: it was there not long ago. too_short: no full block before the last token. disabled: by the engine's
    configuration, or because the request wants log-probabilities of its prompt.
    """

    NO_KV = "no_kv"
    NO_STATE = "no_state"
    EVICTED = "evicted"
    TOO_SHORT = "too_short"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True)
class PrefixMiss:
    """num_tokens: tokens in full blocks that had to be computed. num_kv_tokens: those of them whose KV was there."""

    reason: MissReason
    num_tokens: int
    num_kv_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """num_tokens can be reused: their blocks and, where the pattern has states, `snapshot`. miss: why not more.

    num_held: how many of the blocks somebody holds; to take these up costs no free one.
    diverges_at: the position up to which KV is there, when that is further.
    """

    num_tokens: int
    snapshot: Snapshot | None
    miss: PrefixMiss | None
    num_held: int = 0
    diverges_at: int = 0


@dataclass(slots=True)
class PrefixTotals:
    """Over all admitted prompts; tokens are prompt tokens."""

    prompts: int = 0
    prompts_hit: int = 0
    tokens: int = 0
    tokens_hit: int = 0
    misses: dict[MissReason, int] = field(default_factory=dict)
    tokens_missed: dict[MissReason, int] = field(default_factory=dict)

    def count(self, num_tokens: int, match: Match) -> None:
        self.prompts += 1
        self.prompts_hit += match.num_tokens > 0
        self.tokens += num_tokens
        self.tokens_hit += match.num_tokens
        if (miss := match.miss) is not None:
            self.misses[miss.reason] = self.misses.get(miss.reason, 0) + 1
            self.tokens_missed[miss.reason] = self.tokens_missed.get(miss.reason, 0) + miss.num_tokens


def extend_keys(keys: list[bytes], end: int, tokens: Callable[[int, int], Sequence[int]], block_size: int) -> None:
    """Append the chain keys of the full blocks among the first `end` tokens; tokens(start, end) reads them."""
    for start in range(len(keys) * block_size, end - block_size + 1, block_size):
        ids = array("q", tokens(start, start + block_size)).tobytes()
        keys.append(hashlib.blake2b((keys[-1] if keys else ROOT) + ids, digest_size=16).digest())


class PrefixCache:
    def __init__(self, blocks: BlockPool, snapshots: SnapshotPool, block_size: int, *, enabled: bool) -> None:
        self.blocks, self.snapshots, self.block_size = blocks, snapshots, block_size
        self.has_blocks, self.has_states = blocks.size > 0, snapshots.size > 0
        self.enabled = enabled and (self.has_blocks or self.has_states)
        self.totals = PrefixTotals()
        blocks.on_evict = self._evict_block
        snapshots.on_evict = self._remember
        self._children: dict[bytes, set[bytes]] = {}
        self._parent: dict[bytes, bytes] = {}
        self._evicted: dict[bytes, None] = {}
        self._seen: dict[bytes, None] = {}  # stands in for published blocks where a pattern has none
        self._num_changes = 0

    @property
    def version(self) -> int:
        """Grows with every change that can change what `find` says."""
        return self._num_changes + self.blocks.version + self.snapshots.version

    def find(self, keys: Sequence[bytes], num_tokens: int) -> Match:
        """The longest usable prefix of `num_tokens` tokens with these keys, the last token left to be computed."""
        if not self.enabled:
            return Match(0, None, PrefixMiss(MissReason.DISABLED, num_tokens // self.block_size * self.block_size))
        limit = min(len(keys), (num_tokens - 1) // self.block_size)
        if limit == 0:
            return Match(0, None, PrefixMiss(MissReason.TOO_SHORT, 0))
        if self.has_blocks:
            # What comes before a published block is published, too.
            reach = length = bisect_left(keys, True, hi=limit, key=lambda key: self.blocks.find(key) is None)
        else:
            reach, length = sum(1 for _ in takewhile(self._seen.__contains__, keys[:limit])), limit
        snapshot = None
        if self.has_states:
            snapshot = self.snapshots.find_last(keys[:length])
            length = snapshot.num_tokens // self.block_size if snapshot else 0
        num_held = length - self.blocks.count_idle(keys[:length]) if self.has_blocks else 0
        miss, reach = None, max(reach, length)
        if length < limit:
            if not self._evicted.keys().isdisjoint(keys[length : reach + 1]):
                reason = MissReason.EVICTED
            else:
                reason = MissReason.NO_STATE if reach > length else MissReason.NO_KV
            kv_tokens = (reach - length) * self.block_size if self.has_blocks else 0
            miss = PrefixMiss(reason, (limit - length) * self.block_size, kv_tokens)
        diverges_at = reach * self.block_size if reach > length else 0
        return Match(length * self.block_size, snapshot, miss, num_held, diverges_at)

    def publish(self, keys: Sequence[bytes], blocks: Sequence[int], start: int) -> None:
        """Make blocks start .. len(keys) - 1 findable; their content is written. What lies before them comes back when
        it was given up in the meantime (another request's copy of it)."""
        while start > 0 and not self._is_published(keys[start - 1]):
            start -= 1
        for index in range(start, len(keys)):
            key = keys[index]
            if key in self._evicted:
                del self._evicted[key]
                self._num_changes += 1
            if not self.has_blocks:
                _add_bounded(self._seen, key)
                self._num_changes += 1
            elif self.blocks.find(key) is None:
                self.blocks.publish(blocks[index], key)
                if index:
                    self._parent[key] = keys[index - 1]
                    self._children.setdefault(keys[index - 1], set()).add(key)

    def clear(self) -> None:
        """Forget everything; what running requests hold stays theirs."""
        for key in [*self.blocks.published_keys(), *self.snapshots.held_keys()]:
            self._drop(key)
        self._seen.clear()
        self._num_changes += 1

    def check_integrity(self) -> None:
        """What is published hangs together: every block and snapshot with all that comes before it."""
        if self.has_blocks:
            assert set(self.snapshots.held_keys()) <= set(self.blocks.published_keys()), "a snapshot whose KV is gone"
            for parent, children in self._children.items():
                assert self.blocks.find(parent) is not None, "a block is published and the one before it is not"
                assert children, "a block remembers that something built on it"
                assert all(self.blocks.find(child) is not None for child in children), "a child that is gone"

    def _is_published(self, key: bytes) -> bool:
        return self.blocks.find(key) is not None if self.has_blocks else key in self._seen

    def _evict_block(self, key: bytes) -> None:
        self._remember(key)
        self._drop(key)

    def _drop(self, key: bytes) -> None:
        todo = [key]
        while todo:
            gone = todo.pop()
            todo += self._children.pop(gone, ())
            self._leave_parent(gone)
            self.blocks.unpublish(gone)
            self.snapshots.drop(gone)

    def _leave_parent(self, key: bytes) -> None:
        parent = self._parent.pop(key, None)
        siblings = self._children.get(parent) if parent is not None else None
        if parent is not None and siblings is not None:
            siblings.discard(key)
            if not siblings:
                del self._children[parent]

    def _remember(self, key: bytes) -> None:
        _add_bounded(self._evicted, key)


def _add_bounded(keys: dict[bytes, None], key: bytes) -> None:
    keys.pop(key, None)
    keys[key] = None
    if len(keys) > REMEMBERED:
        del keys[next(iter(keys))]
