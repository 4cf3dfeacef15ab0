"""A pool of equal pieces (state slots), each free or owned by exactly one request. Pure bookkeeping."""

from __future__ import annotations

from hemiola.errors import CapacityError


class Pool:
    """Hands out the pieces 0 .. size-1.

    kind: what a piece is, for messages ("state slot").
    """

    def __init__(self, kind: str, size: int) -> None:
        self.kind, self.size = kind, size
        self._free = list(range(size - 1, -1, -1))
        self._owned: dict[str, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self, owner: str, count: int) -> list[int]:
        """`count` pieces for a request that owns none yet.

        Raises: CapacityError, changing nothing, when too few are free.
        """
        assert owner not in self._owned, f"{owner} already owns {self.kind}s"
        if count > self.num_free:
            raise CapacityError(
                f"no {self.kind}s left", found=f"{self.num_free} of {self.size} free", expected=count, where=owner
            )
        pieces = [self._free.pop() for _ in range(count)]
        self._owned[owner] = pieces
        return list(pieces)

    def release(self, owner: str) -> None:
        """Give back all that `owner` holds; a request that holds nothing may say so, too."""
        self._free.extend(reversed(self._owned.pop(owner, [])))

    def owned(self) -> dict[str, list[int]]:
        """The pieces of each owner."""
        return {owner: list(pieces) for owner, pieces in self._owned.items()}

    def check_integrity(self) -> None:
        """Every piece is free or owned, exactly once. Raises AssertionError naming the first that is not."""
        seen: dict[int, str] = {}
        for owner, pieces in (("the free list", self._free), *self._owned.items()):
            for piece in pieces:
                assert 0 <= piece < self.size, f"{self.kind} {piece} of {owner} does not exist"
                assert piece not in seen, f"{self.kind} {piece} is owned by {seen[piece]} and {owner}"
                seen[piece] = owner
        assert len(seen) == self.size, f"{self.size - len(seen)} {self.kind}s are lost"
