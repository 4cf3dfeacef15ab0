"""The pool of state slots: random sequences of operations keep every piece owned exactly once."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hemiola.cache.pool import Pool
from hemiola.errors import CapacityError


class PoolMachine(RuleBasedStateMachine):
    """Against a model that is only a dictionary of owners."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool("state slot", 0)
        self.size = 0
        self.owned: dict[str, list[int]] = {}
        self.serial = 0

    @initialize(size=st.integers(0, 12))
    def make(self, size: int) -> None:
        self.pool, self.size = Pool("state slot", size), size

    @property
    def num_owned(self) -> int:
        return sum(map(len, self.owned.values()))

    @rule(count=st.integers(0, 14))
    def acquire(self, count: int) -> None:
        self.serial += 1
        owner = f"request {self.serial}"
        if count > self.size - self.num_owned:
            with pytest.raises(CapacityError) as refusal:
                self.pool.acquire(owner, count)
            for part in (owner, f"{self.size - self.num_owned} of {self.size} free", str(count)):
                assert part in str(refusal.value)
            return
        pieces = self.pool.acquire(owner, count)
        assert len(set(pieces)) == count
        assert not set(pieces) & {p for others in self.owned.values() for p in others}
        self.owned[owner] = list(pieces)
        pieces.clear()  # the caller's list is its own

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.owned)))
        self.pool.release(owner)
        del self.owned[owner]
        self.pool.release(owner)  # a second time changes nothing

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def acquire_twice(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.owned)))
        with pytest.raises(AssertionError, match="already owns"):
            self.pool.acquire(owner, 1)

    @rule()
    def release_a_stranger(self) -> None:
        self.pool.release("nobody")

    @invariant()
    def is_whole(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == self.size - self.num_owned


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_random_operations = PoolMachine.TestCase


def test_released_pieces_come_back_in_the_same_order() -> None:
    pool = Pool("state slot", 3)
    assert pool.acquire("a", 2) == [0, 1]
    pool.release("a")
    assert pool.acquire("b", 3) == [0, 1, 2]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._free.pop(), "1 state slots are lost"),
        (lambda pool: pool._free.append(0), "state slot 0 is owned by the free list and a"),
        (lambda pool: pool._owned.update(b=[0]), "state slot 0 is owned by a and b"),
        (lambda pool: pool._free.append(9), "state slot 9 of the free list does not exist"),
    ],
)
def test_the_integrity_check_names_the_damage(damage: object, message: str) -> None:
    pool = Pool("state slot", 4)
    pool.acquire("a", 2)
    pool.check_integrity()
    assert callable(damage)
    damage(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity()
