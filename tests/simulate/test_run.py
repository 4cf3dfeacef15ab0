"""Simulation: times by hand, nobody lost, reuse and preemption where they belong, and the engine's own decisions."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hemiola.cache.budget import CachePlan
from hemiola.config.engine import EngineConfig
from hemiola.config.model import NemotronHConfig
from hemiola.config.sampling import SamplingParams
from hemiola.loading import load
from hemiola.simulate.cost import CostModel
from hemiola.simulate.generate import generate_trace
from hemiola.simulate.geometry import Geometry
from hemiola.simulate.run import Outcome, Run, Simulation
from hemiola.simulate.trace import Arrival, Segment
from tests.support.variants import tiny

COST = CostModel(0.004, 50e-6, 1e-4, 4e12, 25e9)
GEOMETRY = Geometry("tiny", NemotronHConfig.from_dict(tiny("M*")), 4, 4)


def seg(*parts: tuple[str, int]) -> tuple[Segment, ...]:
    return tuple(Segment(*part) for part in parts)


def simulate(
    arrivals: Sequence[Arrival], *, plan: CachePlan | None = None, cost: CostModel = COST, every: int = 1, **more: Any
) -> Run:
    config = EngineConfig(**{"cache_bytes": 1 << 20, "max_model_len": 512, **more})
    plan = plan or GEOMETRY.plan(config)
    return Simulation(
        arrivals, plan, config, cost, max_model_len=config.max_model_len or 0, chunk_size=16, check_every=every
    ).run()


def outcomes(run: Run) -> Counter[Outcome | None]:
    return Counter(record.outcome for record in run.records)


# Times

# 4 bytes of KV per token and 64 of state, at 64 bytes per second: 1/16 s per KV token, 1 s per state read or written.
PLAN = CachePlan(8, 64, 16, 2, 64, 0, 0, ())
BINARY = CostModel(1.0, 0.25, 0.125, device_bytes_per_s=64.0, host_bytes_per_s=64.0)


def test_times_by_hand() -> None:
    """Step 1: a's 3 tokens; 1 + 3/8 + 3/16 + 1 state = 2.5625.
    Step 2: a's token (context 4) and b's 2 tokens; 1 + 1/4 + 2/8 + 6/16 + 3 states = 4.875, to 7.4375.
    Step 3: a's token (context 5); 1 + 1/4 + 5/16 + 2 states = 3.5625, to 11.
    Then nothing until 20. Step 4: c's 1 token; 1 + 1/8 + 1/16 + 1 state = 2.1875."""
    arrivals = [
        Arrival("a", (1, 2, 3), 3, 0.0),
        Arrival("b", seg(("x", 2)), 1, 2.0),
        Arrival("c", (5,), 1, 20.0),
    ]
    run = simulate(arrivals, plan=PLAN, cost=BINARY, prefix_caching=False)
    a, b, c = run.records
    assert (a.arrival_s, a.start_s, a.first_token_s, a.end_s) == (0.0, 0.0, 2.5625, 11.0)
    assert (b.arrival_s, b.start_s, b.first_token_s, b.end_s) == (2.0, 2.5625, 7.4375, 7.4375)
    assert (c.arrival_s, c.start_s, c.first_token_s, c.end_s) == (20.0, 20.0, 22.1875, 22.1875)
    assert [r.num_output_tokens for r in run.records] == [3, 1, 1]
    assert list(run.gaps_s) == [4.875, 3.5625]
    assert (run.num_steps, run.num_decode_tokens, run.num_prefill_tokens) == (4, 2, 6)
    assert (run.end_s, run.busy_s) == (22.1875, 13.1875)
    assert [sample.time_s for sample in run.samples] == [0.0, 2.5625, 7.4375, 11.0, 20.0, 22.1875]
    assert [sample.slots_held for sample in run.samples] == [1, 2, 1, 0, 1, 0]
    assert [sample.blocks_held for sample in run.samples] == [1, 2, 1, 0, 1, 0]


def test_copies_cost_time() -> None:
    """16 tokens end at a block's edge, where a snapshot is copied after the step: 2 states more than without."""
    plan = CachePlan(8, 64, 16, 2, 64, 2, 0, ())
    arrivals = [Arrival("a", seg(("x", 16)), 1, 0.0)]
    on, off = (simulate(arrivals, plan=plan, cost=BINARY, prefix_caching=reuse).end_s for reuse in (True, False))
    assert (on, off) == (7.0, 5.0)


@pytest.mark.parametrize(
    ("after_s", "num_output", "end_s"),
    [
        (0.0, 0, 0.0),  # before it runs
        (1.0, 1, 2.5625),  # in the first step: at its end
        (2.5625, 1, 2.5625),
        (3.0, 2, 6.0625),  # in the second step, of 1 + 1/4 + 4/16 + 2
        (99.0, 3, 9.625),  # after its end
    ],
)
def test_aborts_take_effect_between_steps(after_s: float, num_output: int, end_s: float) -> None:
    run = simulate([Arrival("a", (1, 2, 3), 3, 0.0, abort_after_s=after_s)], plan=PLAN, cost=BINARY)
    (a,) = run.records
    assert (a.num_output_tokens, a.end_s) == (num_output, end_s)
    assert a.outcome is (Outcome.FINISHED if after_s == 99.0 else Outcome.ABORTED)


def test_a_turn_follows_the_end_of_the_one_before() -> None:
    arrivals = [
        Arrival("a", (1, 2, 3), 3, 0.0),
        Arrival("b", (9, 9), 1, follow_up_of="a", think_s=5.0),
        Arrival("c", (7,), 1, follow_up_of="a"),
    ]
    a, b, c = simulate(arrivals, plan=PLAN, cost=BINARY).records
    assert (b.arrival_s, b.num_prompt_tokens) == (a.end_s + 5.0, 8) if a.end_s else False
    assert (c.arrival_s, c.num_prompt_tokens) == (a.end_s, 7)


def test_the_next_turn_of_an_aborted_one_has_what_was_said() -> None:
    arrivals = [Arrival("a", (1, 2, 3), 3, 0.0, abort_after_s=3.0), Arrival("b", (9,), 1, follow_up_of="a")]
    a, b = simulate(arrivals, plan=PLAN, cost=BINARY).records
    assert (a.num_output_tokens, b.num_prompt_tokens, b.outcome) == (2, 6, Outcome.FINISHED)


# Nobody is lost


def random_trace(rng: random.Random) -> list[Arrival]:
    """Shared beginnings, forks, turns, priorities, aborts, and some that are too long."""
    arrivals: list[Arrival] = []
    time_s = 0.0
    for index in range(rng.randint(1, 50)):
        prompt = [Segment(f"own {rng.randrange(20)}", rng.randint(1, 150))]
        if rng.random() < 0.7:
            prompt.insert(0, Segment(f"system {rng.randrange(3)}", rng.choice([16, 50, 128])))
        more: dict[str, Any] = {
            "priority": rng.choice([0, 0, 0, 1, -1]),
            "abort_after_s": rng.choice([None] * 5 + [0.0, 0.5, 3.0, 20.0]),
        }
        if arrivals and rng.random() < 0.3:
            more |= {"follow_up_of": rng.choice(arrivals).request_id, "think_s": 5 * rng.random()}
        else:
            time_s += rng.expovariate(rng.choice([0.2, 5, 50]))
            more["time_s"] = time_s
        arrivals.append(Arrival(str(index), tuple(prompt), rng.randint(1, 40), **more))
    return arrivals


def random_config(rng: random.Random) -> EngineConfig:
    slot = GEOMETRY.plan(EngineConfig()).slot_bytes
    return EngineConfig(
        cache_bytes=rng.randint(2, 8) * slot + 4096 * rng.randint(3, 60),
        max_num_batched_tokens=rng.choice([7, 32, 100, 512]),
        max_num_seqs=rng.randint(1, 8),
        max_model_len=rng.choice([200, 600]),
        prefix_caching=rng.random() < 0.8,
        snapshot_bytes=rng.choice([0, 1, 2, 5, 30]) * slot,
        host_snapshot_bytes=rng.choice([0, 3]) * slot,
        swap_bytes=rng.choice([0, 20_000, 1 << 20]),
        prefill_tokens_per_s=rng.choice([1e2, 1e4]),
    )


def test_every_request_has_an_outcome_and_nothing_is_held() -> None:
    """Integrity is checked after every step, and that the pools are whole at the end, by the simulation itself."""
    total: Counter[Any] = Counter()
    for seed in range(150):
        rng = random.Random(seed)
        arrivals, config = random_trace(rng), random_config(rng)
        run = Simulation(
            arrivals,
            GEOMETRY.plan(config),
            config,
            CostModel(0.05, 0.01, 0.002, 1e12, 1e9),
            max_model_len=config.max_model_len or 0,
            chunk_size=16,
            check_every=1,
        ).run()
        total.update(record.outcome for record in run.records)
        total["swapped"] += run.scheduler.preemptions.swapped
        total["recomputed"] += run.scheduler.preemptions.recomputed
        ledger = run.scheduler.ledger
        assert len(run.records) == len(arrivals)
        assert run.num_checks == run.num_steps + 1
        assert (ledger.blocks.num_free, ledger.slots.num_free) == (ledger.blocks.size, ledger.slots.size)
        assert ledger.snapshots.num_pins == ledger.swapped_bytes == 0
        for arrival, record in zip(arrivals, run.records, strict=True):
            assert (record.error is not None) == (record.outcome is Outcome.REFUSED)
            assert record.num_output_tokens <= arrival.output_tokens
            assert (record.num_output_tokens == arrival.output_tokens) or record.outcome is not Outcome.FINISHED
    assert min(total[key] for key in (*Outcome, "swapped", "recomputed")) > 20, total
    assert total[None] == 0


def test_refusals_are_the_engines_and_pass_to_later_turns() -> None:
    arrivals = [
        Arrival("a", seg(("x", 500)), 40, 0.0),
        Arrival("b", (1,), 1, follow_up_of="a"),
        Arrival("c", (1,), 1, follow_up_of="b"),
    ]
    run = simulate(arrivals)
    assert [record.error for record in run.records] == [
        "a: longer than the model allows; found 500 prompt + 40 output = 540 tokens; expected at most max_model_len "
        "512. Shorten the prompt or lower max_tokens.",
        "b: the turn that it follows was refused",
        "c: the turn that it follows was refused",
    ]
    assert outcomes(run) == {Outcome.REFUSED: 3}


def test_a_run_repeats_exactly() -> None:
    arrivals = list(generate_trace("chat", {"num_requests": 60, "shared_tokens": 64, "rate_per_s": 3.0}))
    first, again = (simulate(arrivals, max_model_len=4096, cache_bytes=200_000) for _ in range(2))
    assert first.records == again.records
    assert (first.samples, first.gaps_s) == (again.samples, again.gaps_s)


# What the caches do


def test_shared_prefixes_are_reused_and_not_when_that_is_off() -> None:
    arrivals = [Arrival(str(i), seg(("system", 160), (f"own {i}", 20)), 4, float(i)) for i in range(10)]
    on, off = simulate(arrivals), simulate(arrivals, prefix_caching=False)
    # The second finds KV and no state, and leaves one where the prompts diverge; from then on all is there.
    assert [record.num_cached_tokens for record in on.records] == [0, 0, *[160] * 8]
    assert [record.miss for record in on.records[:3]] == ["no_kv", "no_state", "no_kv"]
    assert [(record.num_cached_tokens, record.miss) for record in off.records] == [(0, "disabled")] * 10
    assert on.num_prefill_tokens < 0.4 * off.num_prefill_tokens
    assert on.records[5].first_token_s < off.records[5].first_token_s


def test_turns_reuse_what_was_said() -> None:
    """40 + 41 + 16 tokens: of a turn's prompt all but the last, begun block of the conversation before it is reused."""
    arrivals = [Arrival("0", seg(("own 0", 40)), 41, 0.0)]
    arrivals += [Arrival(str(i), seg((f"own {i}", 16)), 41, follow_up_of=str(i - 1), think_s=1.0) for i in range(1, 5)]
    run = simulate(arrivals)
    assert [record.num_prompt_tokens for record in run.records] == [40, 97, 154, 211, 268]
    assert [record.num_cached_tokens for record in run.records] == [0, 80, 128, 192, 240]


def test_long_answers_do_not_push_out_idle_conversations() -> None:
    """Five snapshots: three conversations that think, and two answers of 1,600 tokens that roll theirs meanwhile."""
    arrivals = [Arrival(str(i), seg((f"own {i}", 40)), 60, 0.0) for i in range(3)]
    arrivals += [Arrival(f"long {i}", seg((f"long {i}", 40)), 1600, 1.0 + i) for i in range(2)]
    arrivals += [Arrival(f"next {i}", seg((f"more {i}", 20)), 4, follow_up_of=str(i), think_s=9.0) for i in range(3)]
    run = simulate(arrivals, plan=CachePlan(400, 64, 16, 4, 64, 5, 0, ()), max_model_len=2000)
    assert run.scheduler.ledger.snapshots.counts.rolled > 150
    assert [record.num_cached_tokens for record in run.records[5:]] == [96, 96, 96]


def test_equal_names_are_equal_tokens_and_outputs_are_nobody_elses() -> None:
    prompts = [seg(("x", 64)), seg(("x", 48), ("y", 16)), seg(("y", 64)), (*range(64),), (*range(60), 1, 2, 3, 4)]
    arrivals = [Arrival(str(i), prompt, 1, float(i)) for i, prompt in enumerate(prompts)]
    run = simulate(arrivals, cache_bytes=1 << 22)
    assert [record.num_cached_tokens for record in run.records] == [0, 48, 0, 0, 48]


def test_a_small_pool_preempts_and_a_large_one_does_not() -> None:
    arrivals = [Arrival(str(i), seg((f"own {i}", 60)), 60, 0.0) for i in range(4)]
    small, large = (simulate(arrivals, plan=CachePlan(n, 64, 16, 4, 64, 8, 0, ())) for n in (31, 32))
    assert sum(record.num_preemptions for record in small.records) > 0
    assert sum(record.num_preemptions for record in large.records) == 0
    assert outcomes(small) == outcomes(large) == {Outcome.FINISHED: 4}


def test_priorities_go_first() -> None:
    arrivals = [Arrival(str(i), seg((f"own {i}", 60)), 10, 0.0, priority=3 - i) for i in range(4)]
    ends = [record.end_s for record in simulate(arrivals, max_num_seqs=1).records]
    assert ends == sorted(ends, reverse=True)


@pytest.mark.parametrize("reuse", [True, False])
def test_it_decides_as_the_engine_does(tiny_folder: Callable[..., Path], reuse: bool) -> None:
    """The same requests, all there at the start, in a real engine with a real model."""
    config = EngineConfig(
        cache_bytes=150_000, max_num_seqs=6, max_num_batched_tokens=64, max_model_len=256, prefix_caching=reuse
    )
    engine = load(tiny_folder("M*"), config).engine
    rng = random.Random(0)
    system = tuple(rng.randrange(12, 512) for _ in range(48))
    arrivals = []
    for index in range(16):
        prompt = (*system[: rng.choice([0, 32, 48])], *(rng.randrange(12, 512) for _ in range(rng.randint(1, 90))))
        arrivals.append(Arrival(str(index), prompt, rng.randint(1, 50), 0.0))
    for arrival in arrivals:
        params = SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True)
        engine.add_request(arrival.request_id, [t for t in arrival.prompt if isinstance(t, int)], params)
    while engine.has_unfinished:
        engine.step()
    run = Simulation(arrivals, engine.plan, config, COST, max_model_len=256, chunk_size=16).run()
    real, scheduler = engine.stats(), run.scheduler
    assert real.num_steps > 50
    assert real.preemptions.recomputed + real.preemptions.swapped > 0
    assert (run.num_steps, run.num_prefill_tokens) == (real.num_steps, real.num_prefill_tokens)
    assert run.num_decode_tokens == real.num_decode_tokens
    assert scheduler.ledger.prefix.totals == real.prefix
    assert scheduler.ledger.snapshots.counts == real.snapshots
    assert scheduler.preemptions == real.preemptions
    assert scheduler.blocks.num_evicted == real.blocks_evicted


def test_two_thousand_requests_take_seconds() -> None:
    given = {"num_requests": 2000, "rate_per_s": 20.0, "output_tokens": 50, "prompt_tokens": 100}
    start = time.process_time()
    run = simulate(list(generate_trace("shared-prefix", given)), every=500, cache_bytes=1 << 24, max_model_len=4096)
    assert time.process_time() - start < 10
    assert outcomes(run) == {Outcome.FINISHED: 2000}
    assert run.num_checks > 5
