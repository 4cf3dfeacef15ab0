"""Scheduler: what each step may hold, for any arrivals and aborts; and its refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hemiola.cache.budget import CachePlan
from hemiola.config.engine import EngineConfig
from hemiola.config.sampling import SamplingParams
from hemiola.engine.request import FinishReason, Request, RequestStatus
from hemiola.engine.scheduler import ScheduledRow, Scheduler
from hemiola.errors import CapacityError, ConfigError, RequestError


def plan(num_blocks: int = 20, num_slots: int = 4, block_size: int = 8, block_bytes: int = 100) -> CachePlan:
    return CachePlan(num_blocks if block_bytes else 0, block_bytes, block_size, num_slots, 10, 0, 0, ())


def scheduler(budget: int = 32, chunk_size: int = 16, max_model_len: int = 128, **sizes: int) -> Scheduler:
    config = EngineConfig(max_num_batched_tokens=budget, prefix_caching=False)
    return Scheduler(plan(**sizes), config, max_model_len=max_model_len, chunk_size=chunk_size)


def request(name: str, prompt: int, max_tokens: int = 8) -> Request:
    return Request(name, [1] * prompt, SamplingParams(max_tokens=max_tokens), 0)


@dataclass
class Run:
    """A scheduler with a model that says 1, always. Every step is checked against the rules of a step."""

    scheduler: Scheduler
    unfinished: list[Request] = field(default_factory=list)
    first_scheduled: list[str] = field(default_factory=list)
    num_steps: int = 0

    def add(self, new: Request) -> Request:
        self.scheduler.add(new)
        self.unfinished.append(new)
        return new

    def abort(self, victim: Request) -> None:
        victim.finish(FinishReason.ABORT)
        self.release(victim)

    def release(self, gone: Request) -> None:
        self.unfinished.remove(gone)
        self.scheduler.release(gone)
        self.scheduler.check_integrity()

    def step(self) -> list[ScheduledRow]:
        decoding = [r for r in self.scheduler.running if r.output_ids]
        rows = self.scheduler.schedule()
        self.scheduler.check_integrity()
        self.check(rows, decoding)
        self.num_steps += 1
        self.first_scheduled += [r.request.request_id for r in rows if r.request.num_computed == 0]
        self.scheduler.complete(rows)
        for row in rows:
            if row.request.num_computed == row.request.num_tokens:
                row.request.output_ids.append(1)
                if len(row.request.output_ids) == row.request.params.max_tokens:
                    row.request.finish(FinishReason.LENGTH)
                    self.release(row.request)
        return rows

    def check(self, rows: list[ScheduledRow], decoding: list[Request]) -> None:
        s = self.scheduler
        total = sum(row.num_tokens for row in rows)
        assert bool(rows) == bool(self.unfinished), "somebody waits and nobody runs"
        assert total <= s.max_num_batched_tokens
        assert len({row.request.request_id for row in rows}) == len(rows)
        flags = [row.is_decode for row in rows]
        assert flags == sorted(flags, reverse=True), "decodes come first"
        scheduled = [row.request for row in rows]
        decoding = [r for r in decoding if r.status is RequestStatus.RUNNING]  # others had to give way
        assert all(r in scheduled for r in decoding) or all(r in decoding for r in scheduled), "a decode had to wait"
        assert all(row.num_tokens == 1 for row in rows if row.request in decoding)
        for row in rows:
            r = row.request
            assert r.status is RequestStatus.RUNNING
            assert r.state_slot >= 0
            end = r.num_computed + row.num_tokens
            assert 1 <= row.num_tokens <= r.num_tokens - r.num_computed
            assert row.reaches_end == (end == r.num_tokens)
            assert len(r.blocks) * s.plan.block_size >= end or not s.plan.block_bytes
            if not row.reaches_end and end % s.chunk_size:
                grid = end - end % s.chunk_size
                assert grid <= r.num_computed, f"cut at {end}, though the grid's {grid} was in reach"
                assert total == s.max_num_batched_tokens, "cut without need"
        held = [r for r in self.unfinished if r.blocks or r.state_slot >= 0]
        assert sorted(map(id, held)) == sorted(map(id, s.running))
        assert len({block for r in held for block in r.blocks}) == sum(len(r.blocks) for r in held)

    def finish(self) -> None:
        """Until nobody is left. Each step takes at least one of the tokens that are still to be consumed."""
        left = sum(len(r.prompt_ids) + r.params.max_tokens - r.num_computed for r in self.unfinished)
        for _ in range(left):
            if not self.unfinished:
                break
            self.step()
        assert self.unfinished == [], "starved"
        s = self.scheduler
        assert s.schedule() == []
        assert (s.blocks.num_free, s.slots.num_free) == (s.blocks.size, s.slots.size)
        assert not s.running
        assert not s.waiting


arrivals = st.tuples(st.just("add"), st.integers(1, 60), st.integers(1, 12))
aborts = st.tuples(st.just("abort"), st.integers(0, 9), st.just(0))
steps = st.tuples(st.just("step"), st.integers(1, 4), st.just(0))


@settings(max_examples=300, deadline=None)
@example(events=[("add", 41, 1), ("add", 31, 4)], budget=3, num_slots=2, num_blocks=10, chunk_size=1, block_bytes=100)
@given(
    events=st.lists(st.one_of(arrivals, aborts, steps), max_size=30),
    budget=st.sampled_from([1, 2, 3, 7, 15, 16, 17, 23, 40, 64, 200]),
    num_slots=st.integers(1, 5),
    num_blocks=st.integers(9, 30),
    chunk_size=st.sampled_from([1, 4, 16, 64]),
    block_bytes=st.sampled_from([0, 100]),
)
def test_any_arrivals_and_aborts(
    events: list[tuple[str, int, int]], budget: int, num_slots: int, num_blocks: int, chunk_size: int, block_bytes: int
) -> None:
    run = Run(scheduler(budget, chunk_size, num_slots=num_slots, num_blocks=num_blocks, block_bytes=block_bytes))
    order: list[str] = []
    for index, (event, a, b) in enumerate(events):
        if event == "add":
            order.append(run.add(request(str(index), a, b)).request_id)
        elif event == "abort" and run.unfinished:
            run.abort(run.unfinished[a % len(run.unfinished)])
        elif event == "step":
            for _ in range(a):
                run.step()
    run.finish()
    assert run.first_scheduled == [name for name in order if name in set(run.first_scheduled)], (
        "first come, first served"
    )


def test_a_long_prompt_does_not_hold_up_decodes() -> None:
    """While 100 tokens are consumed in pieces, a running request gets its token in every step."""
    run = Run(scheduler(budget=17, num_blocks=64))
    short = run.add(request("short", 3, 20))
    run.step()
    run.add(request("long", 100, 2))
    for count in range(2, 9):
        rows = run.step()
        assert [(row.request.request_id, row.num_tokens) for row in rows] == (
            [("short", 1), ("long", 16)] if count < 8 else [("short", 1), ("long", 4)]
        )
        assert len(short.output_ids) == count
    run.finish()


@pytest.mark.parametrize(
    ("budget", "chunk_size", "prompt", "pieces"),
    [
        (40, 16, 100, [32, 32, 36]),
        (24, 16, 100, [16, 16, 16, 16, 16, 20]),
        (10, 16, 30, [10, 6, 10, 4]),
        (16, 16, 33, [16, 16, 1]),
        (7, 1, 20, [7, 7, 6]),
        (64, 16, 50, [50]),
    ],
)
def test_prompts_are_cut_on_the_grid_where_it_is_in_reach(
    budget: int, chunk_size: int, prompt: int, pieces: list[int]
) -> None:
    run = Run(scheduler(budget, chunk_size))
    run.add(request("a", prompt, 1))
    taken = []
    while run.unfinished:
        taken += [row.num_tokens for row in run.step()]
    assert taken == pieces


def test_what_a_cut_leaves_goes_to_the_next_request() -> None:
    run = Run(scheduler(budget=40))
    run.add(request("a", 50, 1))
    run.add(request("b", 20, 1))
    assert [(row.request.request_id, row.num_tokens) for row in run.step()] == [("a", 32), ("b", 8)]
    assert [(row.request.request_id, row.num_tokens) for row in run.step()] == [("a", 18), ("b", 12)]


def test_a_piece_of_one_token_stands_among_the_decodes() -> None:
    run = Run(scheduler(budget=17))
    run.add(request("a", 60, 1))
    run.add(request("b", 17, 1))
    assert [(row.request.request_id, row.num_tokens) for row in run.step()] == [("a", 16), ("b", 1)]
    assert [(row.request.request_id, row.num_tokens) for row in run.step()] == [("a", 1), ("b", 16)]


def test_who_does_not_fit_yet_waits_and_is_not_overtaken() -> None:
    """20 blocks of 8: the second request needs 15 and waits for the first one's 10, and the third, small, behind it."""
    run = Run(scheduler(budget=200))
    for name, prompt in (("a", 72), ("b", 112), ("c", 1)):
        run.add(request(name, prompt, 8))
    assert [row.request.request_id for row in run.step()] == ["a"]
    assert [r.request_id for r in run.scheduler.waiting] == ["b", "c"]
    run.finish()
    assert run.first_scheduled == ["a", "b", "c"]


def test_no_more_run_than_there_are_slots() -> None:
    run = Run(scheduler(budget=200, num_slots=2))
    for name in "abcd":
        run.add(request(name, 2, 3))
    assert [row.request.request_id for row in run.step()] == ["a", "b"]
    run.finish()


STAGES: dict[str, Callable[[Run], None]] = {
    "waiting": lambda run: None,
    "in prefill": lambda run: run.step() and None,
    "decoding": lambda run: [run.step() for _ in range(4)] and None,  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("stage", STAGES)
def test_an_abort_in_any_stage_frees_everything(stage: str) -> None:
    run = Run(scheduler(budget=16))
    victim = run.add(request("a", 40, 9))
    STAGES[stage](run)
    assert (victim.state_slot >= 0) == (stage != "waiting")
    assert bool(victim.output_ids) == (stage == "decoding")
    run.abort(victim)
    assert (victim.blocks, victim.state_slot) == ([], -1)
    run.scheduler.release(victim)  # a second time does no harm
    run.finish()


class TestRefusals:
    def test_an_empty_prompt(self) -> None:
        with pytest.raises(RequestError, match=r"^a: the prompt is empty; expected at least one token$"):
            scheduler().add(request("a", 0))

    def test_longer_than_the_model_allows(self) -> None:
        with pytest.raises(CapacityError) as error:
            scheduler(max_model_len=100).add(request("a", 90, 11))
        assert str(error.value) == (
            "a: longer than the model allows; found 90 prompt + 11 output = 101 tokens; expected at most max_model_len "
            "100. Shorten the prompt or lower max_tokens."
        )

    def test_it_can_never_fit_the_kv_cache(self) -> None:
        with pytest.raises(CapacityError) as error:
            scheduler(num_blocks=5).add(request("a", 33, 8))
        assert str(error.value) == (
            "a: can never fit the KV cache; found 33 prompt + 8 output = 41 tokens = 6 blocks of 8; expected at most 5 "
            "blocks. Shorten the prompt, lower max_tokens, or raise cache_bytes."
        )

    def test_the_longest_that_fits_runs(self) -> None:
        for run in (Run(scheduler(num_blocks=5)), Run(scheduler(max_model_len=40))):
            run.add(request("a", 33, 7))
            run.finish()

    def test_a_refused_request_leaves_nothing(self) -> None:
        s = scheduler(num_blocks=5)
        for bad in (request("a", 0), request("b", 33, 8), request("c", 200)):
            with pytest.raises((RequestError, CapacityError)):
                s.add(bad)
        assert s.schedule() == []
        s.check_integrity()


def test_prompts_take_turns() -> None:
    """A long prompt under way and short ones that keep coming: the long one gets every second step's budget, and no
    short one waits for more than the long one's turn and those that came before it."""
    run = Run(scheduler(budget=16, num_blocks=200, num_slots=8, max_model_len=400))
    long = run.add(request("long", 320, 1))
    ages: dict[str, int] = {}
    for number in range(20):
        short = run.add(request(f"short {number}", 16, 1))
        before = long.num_computed
        run.step()
        assert long.num_computed == before + (16 if number % 2 == 0 else 0)
        ages = {name: age + 1 for name, age in ages.items()} | {short.request_id: 1}
        ages = {name: age for name, age in ages.items() if any(r.request_id == name for r in run.unfinished)}
    assert long.num_computed == 160, "half of twenty steps of 16"
    assert len(ages) == 10, "the other half went to short ones, in order"
    run.finish()


def test_priorities_come_before_arrival() -> None:
    run = Run(scheduler(budget=16, num_blocks=64, num_slots=1))
    for name, priority in (("a", 2), ("b", 1), ("c", 1), ("d", 0)):
        new = request(name, 10, 1)
        new.priority = priority
        run.add(new)
    run.finish()
    assert run.first_scheduled == ["d", "b", "c", "a"]


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    num_blocks=st.integers(12, 24),
    budget=st.integers(20, 64),
)
def test_invariant_prompts_are_cut_on_the_grid_alone(prompts: list[int], num_blocks: int, budget: int) -> None:
    """A prompt's pieces end on the grid of 16 or with it; a last single token is no decode; what a request has said is
    consumed one by one, also when it had to give way and starts again."""
    config = EngineConfig(max_num_batched_tokens=budget, prefix_caching=False, invariant=True, swap_bytes=0)
    run = Run(Scheduler(plan(num_blocks=num_blocks), config, max_model_len=72, chunk_size=16))
    for index, length in enumerate(prompts):
        run.add(request(f"r{index}", length, max_tokens=12))
    while run.unfinished:
        run.num_steps += 1
        assert run.num_steps < 2000
        rows = run.scheduler.schedule()
        run.scheduler.check_integrity()
        assert sum(row.num_tokens for row in rows) <= budget
        for row in rows:
            prompt, start = len(row.request.prompt_ids), row.request.num_computed
            end = start + row.num_tokens
            assert row.is_prompt == (start < prompt)
            assert row.is_decode == (start >= prompt)
            assert end % 16 == 0 or end == prompt if row.is_prompt else row.num_tokens == 1
        run.scheduler.complete(rows)
        for row in rows:
            if row.request.num_computed == row.request.num_tokens:
                row.request.output_ids.append(1)
                if len(row.request.output_ids) == row.request.params.max_tokens:
                    row.request.finish(FinishReason.LENGTH)
                    run.release(row.request)


def test_invariant_prompts_need_a_chunk_beside_the_decodes() -> None:
    config = EngineConfig(max_num_batched_tokens=19, invariant=True)
    with pytest.raises(ConfigError, match=r"19.*16 \(chunk_size\) \+ 4"):
        Scheduler(plan(), config, max_model_len=64, chunk_size=16)
