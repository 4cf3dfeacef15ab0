"""KV blocks: references, publishing, the order in which content is given up, and what the integrity check sees."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hemiola.cache.blocks import BlockPool
from hemiola.errors import CapacityError


def test_content_stays_findable_until_the_block_is_needed() -> None:
    pool = BlockPool(3)
    first = pool.acquire(2)
    pool.publish(first[0], b"a")
    pool.release(first)
    assert (pool.num_free, pool.num_published, pool.count_idle([b"a"])) == (3, 1, 1)
    assert first[0] not in pool.acquire(2), "empty ones go first"
    assert pool.find(b"a") == first[0]
    assert pool.acquire(1) == [first[0]]
    assert (pool.find(b"a"), pool.num_evicted) == (None, 1)


def test_beginnings_live_longest() -> None:
    pool = BlockPool(3)
    blocks = pool.acquire(3)
    for block, key in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.publish(block, key)
    pool.release(blocks)
    assert pool.acquire(2) == [blocks[2], blocks[1]]
    assert pool.find(b"a") == blocks[0]


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    held = pool.acquire(1)
    pool.publish(held[0], b"a")
    pool.share(held)
    pool.release(held)
    assert pool.num_free == 1
    pool.check_integrity([held])
    pool.release(held)
    pool.share(held)  # idle content is taken up again
    assert (pool.num_free, pool.count_idle([b"a"])) == (1, 0)


def test_the_first_of_two_with_the_same_content_stays() -> None:
    pool = BlockPool(2)
    one, two = pool.acquire(2)
    pool.publish(one, b"a")
    pool.publish(two, b"a")
    assert pool.find(b"a") == one
    pool.release([one, two])
    assert pool._idle == {b"a": one}


def test_too_many_are_refused_and_nothing_changes() -> None:
    pool = BlockPool(2)
    held = pool.acquire(1)
    with pytest.raises(CapacityError, match="no KV blocks left; found 1 of 2 free; expected 2"):
        pool.acquire(2)
    pool.check_integrity([held])
    assert pool.num_free == 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._empty.pop(), "is in 0 of"),
        (lambda pool: pool._empty.append(0), "KV block 0 is in 2 of"),
        (lambda pool: pool._holders.__setitem__(0, 2), "KV block 0 has 2 references and 1 holders"),
        (lambda pool: pool._empty.append(7), "a KV block outside of the pool"),
        (lambda pool: pool._key_of.clear(), "keys and blocks disagree"),
        (lambda pool: pool._idle.update({b"b": pool._empty.pop()}), "an idle KV block without its content"),
    ],
)
def test_the_integrity_check_names_the_damage(damage: Callable[[BlockPool], None], message: str) -> None:
    pool = BlockPool(3)
    held = pool.acquire(1)
    pool.publish(held[0], b"a")
    pool.check_integrity([held])
    damage(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity([held])
