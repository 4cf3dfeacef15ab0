"""Snapshots: which is given up for which, the host tier, rolling, pins and reservations."""

from __future__ import annotations

import random
from itertools import count

import pytest

from hemiola.cache.movements import CopyState, Forget, LoadState, SaveState
from hemiola.cache.snapshots import Snapshot, SnapshotPool


def pool(size: int = 2, host_size: int = 0) -> SnapshotPool:
    return SnapshotPool(10, size, host_size, [], count())


def take(pool: SnapshotPool, name: str, num_tokens: int, below: Snapshot | None = None) -> Snapshot | None:
    return pool.take(name.encode(), num_tokens, 0, below)


def held(pool: SnapshotPool) -> set[str]:
    pool.check_integrity()
    return {key.decode() for key in pool.held_keys()}


def test_the_least_tokens_go_first_and_only_for_more() -> None:
    p, gone = pool(), []
    p.on_evict = gone.append
    take(p, "long", 400)
    take(p, "short", 32)
    assert take(p, "shorter", 16) is None
    assert held(p) == {"long", "short"}
    take(p, "middle", 100)
    assert held(p) == {"long", "middle"}
    assert gone == [b"short"]
    assert (p.counts.refused, p.counts.evicted) == (1, 1)
    assert p.movements == [CopyState(0, 10), CopyState(0, 11), CopyState(0, 11)]


def test_tokens_saved_are_those_over_the_next_one_below_that_is_held() -> None:
    p = pool(3)
    system = take(p, "system", 1000)
    turn = take(p, "turn", 1100, system)
    assert turn is not None
    assert turn.tokens_saved == 100
    later = take(p, "later", 1150, turn)
    assert later is not None
    assert later.tokens_saved == 50
    p.drop(b"turn")
    assert later.tokens_saved == 150
    p.drop(b"system")
    assert later.tokens_saved == 1150


def test_hits_hold_and_age_lets_go() -> None:
    p = pool()
    used, unused = take(p, "used", 50), take(p, "unused", 80)
    assert used is not None
    assert unused is not None
    p.pin(used)
    p.unpin(used)
    assert p.value(used) > p.value(unused)
    take(p, "new", 90)
    assert held(p) == {"used", "new"}
    for _ in range(40):  # as many refused ones pass by
        take(p, "small", 1)
    take(p, "smaller than used was", 20)
    assert "used" not in held(p)


def test_a_pinned_one_stays() -> None:
    p = pool(1)
    snapshot = take(p, "a", 10)
    assert snapshot is not None
    p.pin(snapshot)
    assert take(p, "b", 1000) is None
    p.unpin(snapshot)
    assert take(p, "b", 1000) is not None
    with pytest.raises(AssertionError, match="nobody pins it"):
        p.unpin(snapshot)


def test_what_gives_way_goes_to_the_host_and_is_read_from_there() -> None:
    p = pool(1, host_size=1)
    first = take(p, "a", 10)
    assert first is not None
    take(p, "b", 20)
    assert held(p) == {"a", "b"}
    assert p.movements[1:] == [SaveState(10, 0), CopyState(0, 10)]
    p.pin(first)
    p.restore(first, 5)
    p.unpin(first)
    assert p.movements[-1] == LoadState(0, 5)
    assert p.counts.host_hits == 1
    take(p, "c", 300)  # b follows to the host, if it is worth more than a, which was hit
    assert held(p) == {"a", "c"}
    p.drop(b"a")
    assert p.movements[-1] == Forget(0)
    assert p.num_on_host == 0


def test_a_rolled_one_moves_on_in_its_slot_unless_it_is_fixed() -> None:
    p = pool()
    first = p.roll(None, b"16", 16, 3, None)
    second = p.roll(first, b"32", 32, 3, None)
    assert second is first
    assert held(p) == {"32"}
    assert p.movements == [CopyState(3, 10), CopyState(3, 10)]
    assert second is not None
    p.pin(second)
    p.unpin(second)
    third = p.roll(second, b"48", 48, 3, None)
    assert third is not second
    assert held(p) == {"32", "48"}


def test_rolling_makes_nobody_older() -> None:
    """One place is an idle conversation's; a long answer rolls in the other, and a short one asks for one in vain."""
    p = pool()
    take(p, "idle", 100)
    rolling = p.roll(None, b"long", 112, 3, None)
    for num_tokens in range(128, 8000, 16):
        assert p.roll(rolling, str(num_tokens).encode(), num_tokens, 3, None) is rolling
        assert p.roll(None, b"short", 96, 4, None) is None
    assert held(p) == {"idle", "7984"}
    assert p.roll(None, b"longer", 112, 4, None) is not None
    assert held(p) == {"longer", "7984"}


def test_one_that_rolls_past_a_fixed_one_is_worth_what_it_saves_over_that() -> None:
    """A prompt in pieces rolls to 500, leaves a fixed one at its end, 1,000, and goes on in the answer."""
    p = pool(3)
    take(p, "idle", 100)
    rolling = p.roll(None, b"500", 500, 3, None)
    prompt = take(p, "prompt", 1000)
    assert p.roll(rolling, b"1016", 1016, 3, prompt) is rolling
    assert rolling is not None
    assert rolling.tokens_saved == 16
    take(p, "other", 60)
    assert held(p) == {"idle", "prompt", "other"}


def test_the_order_is_that_of_all_values_at_any_time() -> None:
    """Random snapshots, hits, rolls and drops: what gives way is what a look at all values names."""
    draw = random.Random(1)
    p = pool(12, host_size=5)
    rolling: list[Snapshot | None] = [None] * 3
    known: list[Snapshot] = []
    for number in range(6000):
        for on_host in (False, True):
            values = [p.value(s) for s in p._held.values() if not s.pins and (s.slot < 0) == on_host]
            least = p._least(on_host=on_host)
            assert (least and p.value(least)) == min(values, default=None)
        known = [snapshot for snapshot in known if snapshot.is_held]
        below = draw.choice([None, *(s for s in known if s.is_fixed)])
        key, num_tokens = str(number).encode(), (below.num_tokens if below else 0) + draw.randrange(1, 300)
        kind = draw.random()
        if kind < 0.4 and (taken := p.take(key, num_tokens, 0, below)) is not None:
            taken.is_fixed = True
            known.append(taken)
        elif kind < 0.8:
            which = draw.randrange(3)
            rolling[which] = p.roll(rolling[which], key, num_tokens, 0, below)
            known += [s for s in (rolling[which],) if s is not None and s not in known]
        elif known and (snapshot := draw.choice(known)).pins:
            p.unpin(snapshot)
        elif known and draw.random() < 0.7:
            p.pin(snapshot)
        elif known:
            p.drop(snapshot.key)
        p.check_integrity()
    assert p.counts.evicted > 100
    assert p.counts.to_host > 100
    assert p.counts.rolled > 100


def test_asking_in_vain_looks_at_a_few_only(monkeypatch: pytest.MonkeyPatch) -> None:
    p = pool(2000)
    for number in range(2000):
        take(p, f"idle {number}", 100 + number)
    looks = []
    value = SnapshotPool.value
    monkeypatch.setattr(SnapshotPool, "value", lambda self, s: looks.append(s) or value(self, s))
    for number in range(1000):
        assert p.roll(None, f"asks {number}".encode(), 16, 3, None) is None
    assert len(looks) <= 3 * 1000


def test_a_rolled_one_leaves_nothing_on_the_host() -> None:
    p = pool(1, host_size=2)
    rolling = p.roll(None, b"16", 16, 3, None)
    take(p, "other", 20)
    assert rolling is not None
    assert (rolling.slot, p.num_on_host) == (-1, 1)
    assert p.roll(rolling, b"18", 18, 3, None) is None, "worth less than what is there"
    assert held(p) == {"16", "other"}
    later = p.roll(rolling, b"32", 32, 3, None)
    assert later is not rolling
    assert held(p) == {"32", "other"}
    assert p.movements[-3:] == [SaveState(10, 1), CopyState(3, 10), Forget(0)]
    assert p.counts.evicted == 0, "what a request replaces itself is not evicted"


def test_a_reserved_one_is_not_found_before_it_is_written() -> None:
    p = pool(1)
    reserved = p.reserve(b"a", 16, None)
    assert reserved is not None
    assert p.find(b"a") is None
    assert p.reserve(b"b", 99, None) is None, "the slot is taken"
    p.check_integrity()
    p.give_back(reserved)
    again = p.reserve(b"a", 16, None)
    assert again is not None
    assert p.publish(again) is p.find(b"a")
    assert (held(p), p.num_reserved) == ({"a"}, 0)


def test_two_that_write_the_same_leave_one() -> None:
    p = pool(2)
    one, two = p.reserve(b"a", 16, None), p.reserve(b"a", 16, None)
    assert one is not None
    assert two is not None
    assert p.publish(one) is p.publish(two)
    assert (p.num_held, p.num_reserved) == (1, 0)
    p.check_integrity()
