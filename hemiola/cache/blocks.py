"""KV blocks: counted references, content keys, and which block to give up next. Pure bookkeeping.

A block is empty (free, nothing worth keeping), held (by one request, or by several when its content is shared) or idle
(held by nobody, but published: its content can be found by its key until the block is needed for something else).
Published blocks are full and never written again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from hemiola.errors import CapacityError


class BlockPool:
    """Hands out the blocks 0 .. size-1.

    on_evict: called with the key of the idle block to give up; it must unpublish that key, and may unpublish more
    (everything that builds on it). By default the key alone goes.
    version: grows whenever something is published or unpublished, or published blocks find or lose a holder.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.on_evict: Callable[[bytes], None] = self.unpublish
        self.num_evicted = 0
        self.version = 0
        self._empty = list(range(size - 1, -1, -1))
        self._idle: dict[bytes, int] = {}  # by key, in the order in which they are given up
        self._holders = [0] * size
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `acquire` could hand out now: empty ones and idle ones."""
        return len(self._empty) + len(self._idle)

    @property
    def num_published(self) -> int:
        return len(self._block_of)

    def acquire(self, count: int) -> list[int]:
        """`count` blocks with one holder each, giving up idle ones (longest idle first) when no empty ones are left.

        Raises: CapacityError, changing nothing, when too few are free.
        """
        if count > self.num_free:
            raise CapacityError("no KV blocks left", found=f"{self.num_free} of {self.size} free", expected=count)
        blocks = []
        for _ in range(count):
            if not self._empty:
                self.num_evicted += 1
                self.on_evict(next(iter(self._idle)))
            blocks.append(self._empty.pop())
            self._holders[blocks[-1]] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each of these published blocks."""
        self.version += 1
        for block in blocks:
            self._holders[block] += 1
            self._idle.pop(self._key_of[block], None)

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each; the last ones of a sequence become idle first, so that beginnings live longest."""
        self.version += 1
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"KV block {block} is released and nobody holds it"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if (key := self._key_of.get(block)) is not None:
                    self._idle[key] = block
                else:
                    self._empty.append(block)

    def find(self, key: bytes) -> int | None:
        """The block whose content has this key."""
        return self._block_of.get(key)

    def __getitem__(self, key: bytes) -> int:
        return self._block_of[key]

    def published_keys(self) -> Iterable[bytes]:
        """Of everything that is published."""
        return self._block_of.keys()

    def is_shared(self, block: int) -> bool:
        return self._holders[block] > 1

    def count_idle(self, keys: Iterable[bytes]) -> int:
        """How many of these keys' blocks nobody holds."""
        return sum(map(self._idle.__contains__, keys))

    def publish(self, block: int, key: bytes) -> None:
        """Make a full, held block's content findable; where another block has the same content, that one stays it."""
        assert self._holders[block] > 0, f"KV block {block} is published and nobody holds it"
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key], self._key_of[block] = block, key
            self.version += 1

    def unpublish(self, key: bytes) -> None:
        """Content with this key is no longer found; an idle block becomes empty, a held one stays its holders'."""
        block = self._block_of.pop(key, None)
        if block is not None:
            del self._key_of[block]
            self.version += 1
            if self._idle.pop(key, None) is not None:
                self._empty.append(block)

    def check_integrity(self, holdings: Iterable[Sequence[int]]) -> None:
        """Each block is empty, idle, or held by exactly as many of `holdings` as it has references.

        Raises: AssertionError naming the first that is not.
        """
        count = Counter(chain.from_iterable(holdings))
        places = [*self._empty, *self._idle.values(), *count]
        is_whole = len(places) == self.size and set(places) == set(range(self.size))
        if not is_whole or sum(self._holders) != count.total() or any(self._holders[b] != n for b, n in count.items()):
            self._name_the_damage(count, Counter(places))
        assert {block: key for key, block in self._block_of.items()} == self._key_of, "keys and blocks disagree"
        assert self._idle.items() <= self._block_of.items(), "an idle KV block without its content"

    def _name_the_damage(self, count: Counter[int], places: Counter[int]) -> None:
        for block in range(self.size):
            assert count[block] == self._holders[block], (
                f"KV block {block} has {self._holders[block]} references and {count[block]} holders"
            )
            assert places[block] == 1, f"KV block {block} is in {places[block]} of: empty, idle, held"
        raise AssertionError("a KV block outside of the pool")
