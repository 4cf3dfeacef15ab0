"""Prefixes: keys, the longest usable one, reasons of misses, and that nothing unusable is kept."""

from __future__ import annotations

from itertools import count

import pytest

from hemiola.cache.blocks import BlockPool
from hemiola.cache.prefix import Match, MissReason, PrefixCache, PrefixMiss, extend_keys
from hemiola.cache.snapshots import SnapshotPool

SIZE = 4


def keys_of(tokens: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, len(tokens), lambda start, end: tokens[start:end], SIZE)
    return keys


def cache(num_blocks: int = 8, num_snapshots: int = 4) -> PrefixCache:
    return PrefixCache(BlockPool(num_blocks), SnapshotPool(0, num_snapshots, 0, [], count()), SIZE, enabled=True)


def computed(prefix: PrefixCache, tokens: list[int], *snapshots: int) -> list[int]:
    """Let a request compute these tokens, with snapshots there, and end."""
    keys = keys_of(tokens)
    blocks = prefix.blocks.acquire(len(keys)) if prefix.has_blocks else []
    prefix.publish(keys, blocks, 0)
    for position in snapshots:
        prefix.snapshots.take(keys[position // SIZE - 1], position, 9, None)
    prefix.blocks.release(blocks)
    prefix.check_integrity()
    return blocks


def find(prefix: PrefixCache, tokens: list[int]) -> tuple[int, MissReason | None]:
    match = prefix.find(keys_of(tokens), len(tokens))
    return match.num_tokens, match.miss.reason if match.miss else None


def test_keys_tell_beginnings_apart() -> None:
    text = list(range(12))
    assert keys_of(text[:11]) == keys_of(text)[:2]
    for position in range(12):
        other = list(text)
        other[position] += 1
        same = [a == b for a, b in zip(keys_of(text), keys_of(other), strict=True)]
        assert same == [block < position // SIZE for block in range(3)]
    assert len({len(key) for key in keys_of(text)} - {16}) == 0
    assert len(set(keys_of([7] * 40))) == 10, "equal blocks at other places are others"


def test_both_halves_are_needed() -> None:
    p, text = cache(), list(range(20))
    assert find(p, text) == (0, MissReason.NO_KV)
    computed(p, text[:16])
    assert find(p, text) == (0, MissReason.NO_STATE)
    match = p.find(keys_of(text), 20)
    assert match.miss is not None
    assert (match.miss.num_tokens, match.miss.num_kv_tokens, match.diverges_at) == (16, 16, 16)
    computed(p, text[:8], 8)
    assert find(p, text) == (8, MissReason.NO_STATE)
    assert p.find(keys_of(text), 20).num_tokens == 8


def test_the_last_token_is_never_reused() -> None:
    p, text = cache(), list(range(8))
    computed(p, text, 4, 8)
    assert find(p, text) == (4, None)
    assert find(p, [*text, 9]) == (8, None)
    assert find(p, text[:4]) == (0, MissReason.TOO_SHORT)


@pytest.mark.parametrize(("num_blocks", "num_snapshots"), [(0, 4), (8, 0)])
def test_a_pattern_with_one_half_needs_only_that(num_blocks: int, num_snapshots: int) -> None:
    p, text = cache(num_blocks, num_snapshots), list(range(20))
    computed(p, text, *([12] if num_snapshots else []))
    assert find(p, text) == ((12, MissReason.NO_STATE) if num_snapshots else (16, None))


def test_a_pattern_with_neither_has_nothing_to_reuse() -> None:
    p = cache(0, 0)
    assert not p.enabled
    assert find(p, list(range(20))) == (0, MissReason.DISABLED)


def test_what_builds_on_a_block_that_goes_goes_with_it() -> None:
    p, text = cache(num_blocks=4), list(range(16))
    keys = keys_of(text)
    blocks = p.blocks.acquire(4)
    p.publish(keys, blocks, 0)
    p.snapshots.take(keys[3], 16, 9, None)
    p.blocks.release([blocks[0]])  # only the beginning is idle (another request's copy of it, say)
    p.blocks.acquire(1)
    p.check_integrity()
    assert p.blocks.num_published == 0
    assert p.snapshots.num_held == 0
    assert find(p, [*text, 5])[1] is MissReason.EVICTED


def test_what_came_back_is_no_longer_evicted() -> None:
    p, text = cache(num_blocks=4), list(range(16))
    computed(p, text, 16)
    p.blocks.release(p.blocks.acquire(4))
    assert find(p, [*text, 5]) == (0, MissReason.EVICTED)
    computed(p, text, 16)
    assert find(p, [*text, 5]) == (16, None)


def test_an_evicted_snapshot_is_said_to_be() -> None:
    p, text = cache(num_snapshots=1), list(range(12))
    computed(p, text, 8)
    other = list(range(100, 116))
    computed(p, other, 16)
    assert find(p, text) == (0, MissReason.EVICTED)


def test_clear_forgets_everything() -> None:
    p, text = cache(), list(range(20))
    computed(p, text, 16)
    p.clear()
    p.check_integrity()
    assert find(p, text) == (0, MissReason.NO_KV)
    assert (p.blocks.num_free, p.snapshots.num_held) == (8, 0)


def test_each_change_of_an_answer_changes_the_version() -> None:
    """Publishing, snapshots that come, roll and go, holders, and what was given up: all that `find` depends on."""
    p, text = cache(num_blocks=6, num_snapshots=1), list(range(17))
    keys = keys_of(text)
    seen = [(p.version, p.find(keys, 17))]

    def changed() -> Match:
        (version, match), now = seen[-1], (p.version, p.find(keys, 17))
        assert now[1] != match, "nothing to see"
        assert now[0] > version
        seen.append(now)
        return now[1]

    blocks = p.blocks.acquire(4)
    p.publish(keys[:2], blocks, 0)
    assert changed().diverges_at == 8
    p.publish(keys, blocks, 2)
    assert changed().diverges_at == 16
    first = p.snapshots.take(keys[0], 4, 9, None)
    assert changed().num_tokens == 4
    p.snapshots.roll(first, keys[1], 8, 9, None)
    assert (changed().num_tokens, seen[-1][1].num_held) == (8, 2)
    p.blocks.release(blocks)
    assert changed().num_held == 0
    p.blocks.share(blocks)
    assert changed().num_held == 2
    reserved = p.snapshots.reserve(keys_of(list(range(90, 130)))[-1], 40, None)
    assert changed().miss == PrefixMiss(MissReason.EVICTED, 16, 16)
    assert reserved is not None
    p.snapshots.give_back(reserved)
    p.publish(keys, blocks, 0)
    assert changed().miss == PrefixMiss(MissReason.NO_STATE, 16, 16)
    p.blocks.release(blocks)
    p.blocks.acquire(5)
    assert changed().diverges_at < 16
    p.clear()
    assert changed().diverges_at == 0


def test_a_pattern_without_kv_counts_what_it_has_seen() -> None:
    p, text = cache(0, 4), list(range(17))
    before = p.version
    computed(p, text)
    assert (find(p, text)[1], p.version > before) == (MissReason.NO_STATE, True)
    before = p.version
    p.clear()
    assert (find(p, text)[1], p.version > before) == (MissReason.NO_KV, True)
