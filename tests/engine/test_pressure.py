"""Scheduler, ledger, prefixes, snapshots and swapping under any load: random operations against the caches in words."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hemiola.cache.budget import CachePlan
from hemiola.cache.prefix import Match
from hemiola.config.engine import EngineConfig
from hemiola.config.sampling import SamplingParams
from hemiola.engine.request import Request
from hemiola.engine.scheduler import ScheduledRow, Scheduler
from hemiola.errors import CapacityError
from tests.support.shadow import Shadow

OPERATIONS: Counter[str] = Counter()
BLOCK = 4
EVENTS = [
    "fail",
    "abort",
    "refuse",
    "swapped",
    "recomputed",
    "hit",
    "host hit",
    "evicted snapshot",
    "evicted block",
    "rolled",
]
EVENTS += [f"miss {reason}" for reason in ("no_kv", "no_state", "evicted", "too_short", "disabled")]


def shadow(
    num_blocks: int = 24,
    num_slots: int = 4,
    num_snapshots: int = 6,
    num_host: int = 0,
    *,
    block_bytes: int = 100,
    slot_bytes: int = 50,
    chunk_size: int = 4,
    **settings_: Any,
) -> Shadow:
    plan = CachePlan(
        num_blocks if block_bytes else 0,
        block_bytes,
        BLOCK,
        num_slots,
        slot_bytes,
        num_snapshots if slot_bytes else 0,
        num_host if slot_bytes else 0,
        (),
    )
    config = EngineConfig(**settings_)
    return Shadow(Scheduler(plan, config, max_model_len=400, chunk_size=chunk_size))


def request(name: str, prompt: list[int], max_tokens: int = 6, priority: int = 0, **params: Any) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, **params), 0, priority=priority)


@contextmanager
def failing(run: Shadow, pool: str, after: int) -> Iterator[list[int]]:
    """The allocation after the next `after` ones fails, though there is room. Yields how many there were, in a list."""
    owner: Any = getattr(run.scheduler.ledger, pool)
    original, calls = owner.acquire, [0]

    def acquire(*arguments: Any) -> list[int]:
        calls[0] += 1
        if calls[0] == after + 1:
            raise CapacityError("forced")
        return original(*arguments)  # type: ignore[no-any-return]

    owner.acquire = acquire
    try:
        yield calls
    finally:
        owner.acquire = original


class Load(RuleBasedStateMachine):
    """Prompts are beginnings of a few texts with tails of their own, so that prefixes are shared, and diverge."""

    def __init__(self) -> None:
        super().__init__()
        self.shadow = shadow()
        self.serial = 0
        self.in_flight: list[ScheduledRow] | None = None

    @initialize(
        num_blocks=st.integers(17, 26),
        num_slots=st.integers(1, 5),
        num_snapshots=st.integers(0, 8),
        num_host=st.sampled_from([0, 0, 1, 4]),
        sizes=st.sampled_from([(100, 50), (100, 50), (100, 50), (0, 50), (100, 0), (0, 0)]),
        chunk_size=st.sampled_from([1, 4, 8, 16]),
        budget=st.sampled_from([1, 3, 8, 17, 64]),
        speed=st.sampled_from([1e-3, 1.0, 1e12]),
        swap_bytes=st.sampled_from([0, 600, 10**6]),
        caching=st.sampled_from([True, True, True, False]),
    )
    def make(
        self, num_blocks: int, num_slots: int, num_snapshots: int, num_host: int, sizes: tuple[int, int],
        chunk_size: int, budget: int, speed: float, swap_bytes: int, caching: bool,
    ) -> None:  # fmt: skip
        self.shadow = shadow(
            num_blocks, num_slots, num_snapshots, num_host, block_bytes=sizes[0], slot_bytes=sizes[1],
            chunk_size=chunk_size, max_num_batched_tokens=budget, prefill_tokens_per_s=speed, host_bytes_per_s=100.0,
            swap_bytes=swap_bytes, prefix_caching=caching,
        )  # fmt: skip

    @rule(
        text=st.integers(0, 2),
        shared=st.integers(0, 30),
        tail=st.integers(0, 12),
        output=st.integers(1, 24),
        priority=st.sampled_from([0, 0, 0, 1, 2]),
        copies=st.sampled_from([1, 1, 1, 3]),
        fresh=st.booleans(),
        needs_all=st.sampled_from([None, None, None, 0]),
    )
    def add(
        self, text: int, shared: int, tail: int, output: int, priority: int, copies: int, fresh: bool,
        needs_all: int | None,
    ) -> None:  # fmt: skip
        own = 1000 + self.serial if fresh else 900
        prompt = [10 * text + position % 7 for position in range(shared)] + [own + i for i in range(tail)]
        for _ in range(copies):
            self.serial += 1
            new = request(str(self.serial), prompt or [5], output, priority, prompt_logprobs=needs_all)
            self.shadow.add(new)
        OPERATIONS["add"] += copies

    @precondition(lambda self: self.in_flight is None)
    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.shadow.step()
            OPERATIONS["step"] += 1

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def begin_step(self) -> None:
        self.in_flight = self.shadow.schedule()
        self.shadow.run(self.in_flight)
        OPERATIONS["begin"] += 1

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def end_step(self) -> None:
        assert self.in_flight is not None
        self.shadow.complete(self.in_flight)
        self.in_flight = None
        OPERATIONS["end"] += 1

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def fail_step(self) -> None:
        """The model raised in the middle: its slots and blocks hold anything now."""
        for row in self.in_flight or ():
            if row.request.state_slot >= 0:
                self.shadow.states[row.request.state_slot] = None
        self.shadow.scheduler.distrust()
        self.shadow.host.clear()
        self.in_flight = None
        OPERATIONS["fail"] += 1

    @precondition(lambda self: self.shadow.unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.shadow.abort(data.draw(st.sampled_from(self.shadow.unfinished)))
        OPERATIONS["abort"] += 1

    @precondition(lambda self: self.in_flight is None)
    @rule(after=st.integers(0, 4), pool=st.sampled_from(["blocks", "slots"]))
    def refuse(self, after: int, pool: str) -> None:
        """One step in which the allocation after the next `after` ones fails, though there is room."""
        with failing(self.shadow, pool, after) as calls:
            rows = self.shadow.schedule()
            self.shadow.run(rows)
            self.shadow.complete(rows)
        OPERATIONS["refuse"] += calls[0] > after
        OPERATIONS["step"] += 1

    @invariant()
    def is_whole(self) -> None:
        self.shadow.check()

    def teardown(self) -> None:
        if self.in_flight is not None:
            self.shadow.complete(self.in_flight)
        self.shadow.finish()
        counts = self.shadow.scheduler.preemptions
        if counts.swapped:
            event("swapped")
        if counts.recomputed:
            event("recomputed")
        ledger = self.shadow.scheduler.ledger
        for kind, count in (
            ("swapped", counts.swapped),
            ("recomputed", counts.recomputed),
            ("hit", ledger.prefix.totals.prompts_hit),
            ("host hit", ledger.snapshots.counts.host_hits),
            ("evicted snapshot", ledger.snapshots.counts.evicted),
            ("evicted block", ledger.blocks.num_evicted),
            ("rolled", ledger.snapshots.counts.rolled),
            *((f"miss {reason.value}", n) for reason, n in ledger.prefix.totals.misses.items()),
        ):
            OPERATIONS[kind] += count


Load.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None, derandomize=True)
test_any_load = Load.TestCase


def test_the_load_was_one() -> None:
    """The operations above were as many as are promised, and met every event that the code distinguishes."""
    counted = sum(OPERATIONS[kind] for kind in ("add", "step", "begin", "end", "fail", "abort", "refuse"))
    assert counted == 0 or counted >= 10_000, "0: this test was picked alone"
    missed = [kind for kind in EVENTS if not OPERATIONS[kind]] if counted else []
    assert missed == [], dict(OPERATIONS)


def test_an_abort_in_the_middle_of_a_step_lets_go_of_pins_and_reservations() -> None:
    """A request that starts from a snapshot and is about to write another, aborted before its step is done."""
    run = shadow(chunk_size=16)
    run.add(request("first", list(range(10))))
    run.finish()
    run.add(request("second", [*range(10), *range(50, 60)]))
    second = run.unfinished[0]
    rows = run.schedule()
    snapshots = run.scheduler.ledger.snapshots
    assert (second.num_cached_tokens, snapshots.num_pins) == (8, 1)
    run.run(rows)
    run.abort(second)
    assert (snapshots.num_pins, snapshots.num_reserved) == (0, 0)
    run.complete(rows)
    run.finish()
    run.add(request("third", list(range(30, 42))))
    rows = run.schedule()
    assert [count for count, _ in rows[0].marks] == [8]
    assert snapshots.num_reserved == 1
    run.abort(run.unfinished[0])
    assert snapshots.num_reserved == 0
    run.finish()


def count_searches(run: Shadow) -> list[int]:
    """The numbers of tokens for which the prefix index was searched from now on."""
    searched: list[int] = []
    prefix: Any = run.scheduler.ledger.prefix
    original = prefix.find

    def find(keys: list[bytes], num_tokens: int) -> Match:
        searched.append(num_tokens)
        return original(keys, num_tokens)  # type: ignore[no-any-return]

    prefix.find = find
    return searched


def test_a_prefix_is_searched_for_again_only_after_a_change() -> None:
    """68 tokens wait in vain for 17 blocks of 24 while a request decodes: only a step that completes one of its blocks,
    every fourth, can have changed anything."""
    run = shadow(prefill_tokens_per_s=1e12)
    run.add(request("runs", list(range(30)), 40))
    run.step()
    run.add(request("waits", list(range(100, 168)), 6))
    searched = count_searches(run)
    for _ in range(32):
        run.step()
    (waiting,) = run.scheduler.waiting
    assert (waiting.request_id, waiting.num_preemptions) == ("waits", 0)
    assert 1 <= len([count for count in searched if count == 68]) <= 1 + 32 // BLOCK
    run.finish()


def test_nothing_is_searched_for_a_request_that_was_swapped_out() -> None:
    run = shadow(num_blocks=17, prefill_tokens_per_s=1e-3, host_bytes_per_s=1e9)
    run.add(request("first", list(range(30)), 30))
    run.add(request("second", list(range(100, 120)), 30))
    while not run.scheduler.preemptions.swapped:
        run.step()
    (waiting,) = run.scheduler.waiting
    assert waiting.holding.swapped is not None
    searched = count_searches(run)
    for _ in range(3):
        run.step()
    assert waiting.holding.swapped is not None
    assert searched == []
    run.finish()


@pytest.mark.parametrize("pool", ["blocks", "slots"])
@pytest.mark.parametrize("speed", [1e-3, 1e12], ids=["swap", "recompute"])
def test_b21_a_failure_at_any_allocation_leaves_no_half_made_request(pool: str, speed: float) -> None:
    """Each allocation of one load in turn is made to fail: all requests end with all their tokens, and nothing is held
    (`Shadow.finish`). Three of four slots start from cached prefixes, whose snapshots are pinned at that moment."""
    swapped = 0
    for after in itertools.count():
        run = shadow(num_blocks=22, num_slots=4, prefill_tokens_per_s=speed, host_bytes_per_s=1e3)
        prompts = [[100 * text + position for position in range(13)] for text in range(3)]
        for number, prompt in enumerate(prompts):
            run.add(request(f"first {number}", prompt, 2))
        run.finish()
        requests = [request(str(number), [*prompts[number % 3], number], 20) for number in range(6)]
        with failing(run, pool, after) as calls:
            for new in requests:
                run.add(new)
            for _ in range(300):
                rows = run.schedule()
                run.run(rows)
                run.complete(rows)
        run.finish()
        assert [len(done.output_ids) for done in requests] == [20] * 6
        assert run.scheduler.ledger.snapshots.num_pins == run.scheduler.ledger.snapshots.num_reserved == 0
        swapped += run.scheduler.preemptions.swapped
        if calls[0] <= after:
            break
    assert after >= 6
    assert (swapped > 0) == (speed == 1e-3)
