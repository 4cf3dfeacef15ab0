"""Figures of a simulation: counts, shares, percentiles and pools over time, as plain data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from hemiola.config.engine import EngineConfig
from hemiola.simulate.cost import CostModel
from hemiola.simulate.geometry import Geometry
from hemiola.simulate.run import Outcome, RequestRecord, Run, Sample

NUM_POINTS = 240  # of a timeline
# The settings that a simulation depends on.
SETTINGS = (
    *("block_size", "max_num_batched_tokens", "max_num_seqs", "max_model_len", "cache_bytes", "prefix_caching"),
    *("snapshot_bytes", "host_snapshot_bytes", "swap_bytes", "prefill_tokens_per_s", "host_bytes_per_s"),
)


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles are nearest-rank: the smallest value that so many per cent of all do not exceed."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """None for no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p90, p99 = (ordered[math.ceil(part * len(ordered) / 100) - 1] for part in (50, 90, 99))
        return cls(len(ordered), math.fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Of `size`: the mean over simulated time, and the most at any time."""

    size: int
    mean: float
    peak: int


@dataclass(frozen=True, slots=True)
class PrefixUse:
    """Over admitted prompts, each counted when it first ran. misses, tokens_missed: by reason; a prompt that was reused
    in part counts as a hit, and as a miss for the rest."""

    prompts: int
    prompts_hit: int
    tokens: int
    tokens_hit: int
    misses: dict[str, int]
    tokens_missed: dict[str, int]

    @property
    def cached_share(self) -> float:
        return self.tokens_hit / self.tokens if self.tokens else 0.0


@dataclass(frozen=True, slots=True)
class Steps:
    """rows, tokens: per step. budget_used: mean tokens over max_num_batched_tokens. prefill_tokens: computed, those
    computed again after a preemption included. busy_s: of the simulated time, in steps."""

    steps: int
    busy_s: float
    rows: Spread | None
    tokens: Spread | None
    budget_used: float
    decode_tokens: int
    prefill_tokens: int


@dataclass(frozen=True, slots=True)
class Report:
    """times_s: queueing (arrival to the first step it is in), first_token (from arrival), between_tokens (all gaps
    inside of requests), end_to_end (arrival to end, finished ones). refusals: how often, by reason.
    timeline: columns of equal length; a value is the highest between its time and the next.
    """

    model: dict[str, Any]
    settings: dict[str, Any]
    plan: dict[str, Any]
    cost: dict[str, float]
    outcomes: dict[str, int]
    refusals: dict[str, int]
    simulated_s: float
    output_tokens_per_s: float
    times_s: dict[str, Spread | None]
    prefix: PrefixUse
    preemptions: dict[str, int]
    snapshot_counts: dict[str, int]
    blocks_evicted: int
    pools: dict[str, PoolUse]
    steps: Steps
    integrity_checks: int
    timeline: dict[str, list[float]]
    requests: tuple[RequestRecord, ...]


def build_report(run: Run, geometry: Geometry, config: EngineConfig, cost: CostModel) -> Report:
    plan, records = run.scheduler.plan, run.records
    outcomes = Counter(record.outcome for record in records)
    preemptions = asdict(run.scheduler.preemptions)
    del preemptions["recent"]
    settings = {name: getattr(config, name) for name in SETTINGS}
    settings["max_model_len"] = run.scheduler.max_model_len
    num_tokens = sum(record.num_output_tokens for record in records)
    return Report(
        model={
            "name": geometry.name,
            "pattern": geometry.config.pattern,
            "state_bytes": plan.slot_bytes,
            "kv_bytes_per_token": plan.block_bytes // plan.block_size,
            "chunk_size": geometry.chunk_size,
        },
        settings=settings,
        plan=asdict(plan),
        cost=asdict(cost),
        outcomes={outcome.value: outcomes[outcome] for outcome in Outcome},
        refusals=_refusals(records),
        simulated_s=run.end_s,
        output_tokens_per_s=num_tokens / run.end_s if run.end_s else 0.0,
        times_s=_times(run),
        prefix=_prefix(run),
        preemptions=preemptions,
        snapshot_counts=asdict(run.scheduler.ledger.snapshots.counts),
        blocks_evicted=run.scheduler.blocks.num_evicted,
        pools=_pools(run, config),
        steps=_steps(run, config),
        integrity_checks=run.num_checks,
        timeline=_timeline(run),
        requests=tuple(records),
    )


def to_json(report: Report) -> dict[str, Any]:
    """The report as plain dicts, lists, texts and numbers."""
    values = asdict(report)
    values["prefix"]["cached_share"] = report.prefix.cached_share
    for record in values["requests"]:
        record["outcome"] = record["outcome"].value
    return values


def _refusals(records: Iterable[RequestRecord]) -> dict[str, int]:
    """By what is wrong, without whose it is and the numbers."""
    return dict(Counter(_problem(record) for record in records if record.error is not None))


def _problem(record: RequestRecord) -> str:
    return str(record.error).removeprefix(f"{record.request_id}: ").partition(";")[0].rstrip(".")


def _times(run: Run) -> dict[str, Spread | None]:
    def since_arrival(name: str, *, finished: bool = False) -> Iterator[float]:
        for record in run.records:
            time_s = getattr(record, name)
            is_wanted = not finished or record.outcome is Outcome.FINISHED
            if is_wanted and time_s is not None and record.arrival_s is not None:
                yield time_s - record.arrival_s

    return {
        "queueing": Spread.of(since_arrival("start_s")),
        "first_token": Spread.of(since_arrival("first_token_s")),
        "between_tokens": Spread.of(run.gaps_s),
        "end_to_end": Spread.of(since_arrival("end_s", finished=True)),
    }


def _prefix(run: Run) -> PrefixUse:
    totals = run.scheduler.ledger.prefix.totals
    return PrefixUse(
        totals.prompts,
        totals.prompts_hit,
        totals.tokens,
        totals.tokens_hit,
        {reason.value: number for reason, number in totals.misses.items()},
        {reason.value: number for reason, number in totals.tokens_missed.items()},
    )


def _steps(run: Run, config: EngineConfig) -> Steps:
    rows, tokens = run.rows_per_step, run.tokens_per_step
    budget = config.max_num_batched_tokens
    return Steps(
        run.num_steps,
        run.busy_s,
        Spread.of(rows),
        Spread.of(tokens),
        sum(tokens) / (budget * len(tokens)) if tokens else 0.0,
        run.num_decode_tokens,
        run.num_prefill_tokens,
    )


def _pools(run: Run, config: EngineConfig) -> dict[str, PoolUse]:
    plan = run.scheduler.plan
    sizes = {
        "blocks_held": plan.num_blocks,
        "blocks_published": plan.num_blocks,
        "slots_held": plan.num_slots,
        "snapshots": plan.num_snapshots,
        "host_snapshots": plan.num_host_snapshots,
        "swapped_bytes": config.swap_bytes,
    }
    return {name: _use(run.samples, name, size) for name, size in sizes.items()}


def _use(samples: Sequence[Sample], name: str, size: int) -> PoolUse:
    total_s = samples[-1].time_s - samples[0].time_s
    area = math.fsum(getattr(one, name) * (two.time_s - one.time_s) for one, two in pairwise(samples))
    return PoolUse(size, area / total_s if total_s else 0.0, max(getattr(sample, name) for sample in samples))


def _timeline(run: Run) -> dict[str, list[float]]:
    """Peaks of every figure in NUM_POINTS equal stretches of time."""
    width = run.end_s / NUM_POINTS
    peaks: list[list[float]] = [[0.0] * NUM_POINTS for _ in Sample._fields[1:]]
    for one, two in pairwise(run.samples):
        if width == 0.0:
            break
        first, last = int(one.time_s / width), math.ceil(two.time_s / width)
        for column, value in zip(peaks, one[1:], strict=True):
            for point in range(first, min(last, NUM_POINTS)):
                column[point] = max(column[point], value)
    times = [point * width for point in range(NUM_POINTS)]
    return dict(zip(Sample._fields, [times, *peaks], strict=True))
