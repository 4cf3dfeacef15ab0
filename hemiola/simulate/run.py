"""The simulation itself: the engine's cycle (arrivals and aborts between steps, schedule, copies, run, complete) with a
clock that a cost model moves. Who is scheduled, what is reused and who gives way is the engine's own code.
"""

from __future__ import annotations

import enum
import heapq
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

from hemiola.cache.budget import CachePlan
from hemiola.config.engine import EngineConfig
from hemiola.config.sampling import SamplingParams
from hemiola.engine.request import FinishReason, Request
from hemiola.engine.scheduler import Scheduler
from hemiola.errors import CapacityError, HemiolaError, RequestError
from hemiola.simulate.cost import CostModel, StepWork, measure, moved_bytes
from hemiola.simulate.trace import Arrival, Segment

CHECK_EVERY = 500  # steps between integrity checks


class Outcome(enum.Enum):
    FINISHED = "finished"
    ABORTED = "aborted"
    REFUSED = "refused"


@dataclass(slots=True)
class RequestRecord:
    """What became of one arrival. Times are seconds since the trace's zero: of its arrival, of the beginning of the
    first step that it was in, of its first token, of its end. None: it did not come so far. error: why it was refused.
    """

    request_id: str
    outcome: Outcome | None = None
    arrival_s: float | None = None
    start_s: float | None = None
    first_token_s: float | None = None
    end_s: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int | None = None
    miss: str | None = None
    num_output_tokens: int = 0
    num_preemptions: int = 0
    error: str | None = None


class Sample(NamedTuple):
    """State from `time_s` on until the next sample; in a step, as it runs. blocks_published: findable, held or not."""

    time_s: float
    num_waiting: int
    num_running: int
    num_decodes: int
    num_prefill_tokens: int
    blocks_held: int
    blocks_published: int
    slots_held: int
    snapshots: int
    host_snapshots: int
    swapped_bytes: int


@dataclass(slots=True)
class Run:
    """All that a simulation leaves. gaps_s: between a request's consecutive tokens, of all requests. rows_per_step,
    tokens_per_step: of each step. end_s: the clock at the end; busy_s: of that, in steps."""

    records: list[RequestRecord]
    scheduler: Scheduler
    samples: list[Sample] = field(default_factory=list)
    gaps_s: array[float] = field(default_factory=lambda: array("d"))
    rows_per_step: array[int] = field(default_factory=lambda: array("l"))
    tokens_per_step: array[int] = field(default_factory=lambda: array("l"))
    num_steps: int = 0
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    num_checks: int = 0
    busy_s: float = 0.0
    end_s: float = 0.0


class _Event(NamedTuple):
    """At `time_s`, equal times in order of `number`: an arrival, behind the `earlier` tokens of its conversation (None
    when there is no conversation to follow), or an abort."""

    time_s: float
    number: int
    arrival: Arrival
    earlier: list[int] | None
    is_abort: bool = False


@dataclass(slots=True, eq=False)
class _Live:
    request: Request
    record: RequestRecord
    said: int  # token id of its first output token; the others follow
    last_token_s: float = 0.0


class Simulation:
    """One run of one trace; use it once."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        plan: CachePlan,
        config: EngineConfig,
        cost: CostModel,
        *,
        max_model_len: int,
        chunk_size: int,
        check_every: int = CHECK_EVERY,
    ) -> None:
        self.plan, self.cost, self.check_every = plan, cost, check_every
        self.scheduler = Scheduler(plan, config, max_model_len=max_model_len, chunk_size=chunk_size)
        self._records = {arrival.request_id: RequestRecord(arrival.request_id) for arrival in arrivals}
        self.result = Run(list(self._records.values()), self.scheduler)
        self._now = 0.0
        self._numbers = count()
        self._live: dict[str, _Live] = {}
        self._first_ids: dict[str, int] = {}  # of segments
        self._id_spaces = count(1)
        self._follow_ups: dict[str, list[Arrival]] = {}
        self._events: list[_Event] = []
        self._steps_without_token = 0
        for arrival in arrivals:
            if arrival.follow_up_of is not None:
                self._follow_ups.setdefault(arrival.follow_up_of, []).append(arrival)
            elif arrival.time_s is not None:
                heapq.heappush(self._events, _Event(arrival.time_s, next(self._numbers), arrival, []))

    def run(self) -> Run:
        """Until every arrival has its outcome.

        Raises: AssertionError when the scheduler stands still, or when the caches lose or share what they must not.
        """
        while self._events or self._live:
            while self._events and self._events[0].time_s <= self._now:
                self._happen(heapq.heappop(self._events))
            if self._live:
                self._step()
            elif self._events:
                self._sample(None)
                self._now = self._events[0].time_s
        self._check_end()
        self.result.end_s = self._now
        self._sample(None)
        return self.result

    # Events

    def _happen(self, event: _Event) -> None:
        arrival = event.arrival
        if event.is_abort:
            if (live := self._live.get(arrival.request_id)) is not None:
                live.request.finish(FinishReason.ABORT)
                self._end(live, Outcome.ABORTED)
            return
        record = self._records[arrival.request_id]
        record.arrival_s = event.time_s
        if event.earlier is None:
            self._refuse(record, RequestError("the turn that it follows was refused", where=arrival.request_id))
            return
        prompt = event.earlier + self._tokens(arrival.prompt)
        record.num_prompt_tokens = len(prompt)
        params = SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True)
        request = Request(arrival.request_id, prompt, params, seed=0, priority=arrival.priority)
        try:
            self.scheduler.add(request)
        except (CapacityError, RequestError) as error:
            self._refuse(record, error)
            return
        self._live[arrival.request_id] = _Live(request, record, self._new_ids())
        self._steps_without_token = 0
        if arrival.abort_after_s is not None:
            at = event.time_s + arrival.abort_after_s
            heapq.heappush(self._events, _Event(at, next(self._numbers), arrival, None, is_abort=True))

    def _refuse(self, record: RequestRecord, error: HemiolaError) -> None:
        record.outcome, record.end_s, record.error = Outcome.REFUSED, self._now, str(error)
        self._announce(record.request_id, None)

    def _end(self, live: _Live, outcome: Outcome) -> None:
        """A request is finished: free what it holds, keep what is known of it, let its follow-ups come."""
        request, record = live.request, live.record
        self.scheduler.release(request)
        del self._live[record.request_id]
        record.outcome, record.end_s = outcome, self._now
        record.num_cached_tokens, record.num_preemptions = request.num_cached_tokens, request.num_preemptions
        record.miss = request.prefix_miss.reason.value if request.prefix_miss else None
        record.num_output_tokens = len(request.output_ids)
        self._announce(record.request_id, request)

    def _announce(self, request_id: str, request: Request | None) -> None:
        for arrival in self._follow_ups.pop(request_id, ()):
            tokens = request.prompt_ids + request.output_ids if request else None
            heapq.heappush(self._events, _Event(self._now + arrival.think_s, next(self._numbers), arrival, tokens))

    # Steps

    def _step(self) -> None:
        scheduler = self.scheduler
        rows = scheduler.schedule()
        movements = scheduler.take_movements()
        assert rows, f"the scheduler stands still at {self._now} s with {len(self._live)} requests"
        work = measure(rows, self.plan)
        self._sample(work)
        for row in rows:
            record = self._live[row.request.request_id].record
            record.start_s = self._now if record.start_s is None else record.start_s
        due = [row.request for row in rows if row.reaches_end]
        scheduler.complete(rows)
        device, host = moved_bytes([*movements, *scheduler.take_movements()], self.plan)
        work = replace(work, state_bytes=work.state_bytes + device, host_bytes=host)
        seconds = self.cost.step_s(work, self.plan)
        self._now += seconds
        self.result.rows_per_step.append(len(rows))
        self.result.tokens_per_step.append(sum(row.num_tokens for row in rows))
        self._count(work, seconds, len(due))
        for request in due:
            self._say(self._live[request.request_id])

    def _count(self, work: StepWork, seconds: float, num_tokens: int) -> None:
        result = self.result
        result.num_steps += 1
        result.busy_s += seconds
        result.num_decode_tokens += work.num_decodes
        result.num_prefill_tokens += work.num_prefill_tokens
        # The first in order gets a token of its own into every second step at least, and is never made to give way.
        self._steps_without_token = 0 if num_tokens else self._steps_without_token + 1
        assert self._steps_without_token <= 2 * self.scheduler.max_model_len + 2, (
            f"no request gets on: {self._steps_without_token} steps without a new token at {self._now} s"
        )
        if result.num_steps % self.check_every == 0:
            self.scheduler.check_integrity()
            result.num_checks += 1

    def _say(self, live: _Live) -> None:
        """The step gave this request its next token."""
        request, record = live.request, live.record
        if record.first_token_s is None:
            record.first_token_s = self._now
        else:
            self.result.gaps_s.append(self._now - live.last_token_s)
        live.last_token_s = self._now
        request.output_ids.append(live.said + len(request.output_ids))
        if len(request.output_ids) == request.params.max_tokens:
            request.finish(FinishReason.LENGTH)
            self._end(live, Outcome.FINISHED)

    def _sample(self, work: StepWork | None) -> None:
        scheduler, ledger = self.scheduler, self.scheduler.ledger
        self.result.samples.append(
            Sample(
                self._now,
                len(scheduler.waiting),
                len(scheduler.running),
                work.num_decodes if work else 0,
                work.num_prefill_tokens if work else 0,
                ledger.blocks.size - ledger.blocks.num_free,
                ledger.blocks.num_published,
                ledger.slots.size - ledger.slots.num_free,
                ledger.snapshots.num_held,
                ledger.snapshots.num_on_host,
                ledger.swapped_bytes,
            )
        )

    def _check_end(self) -> None:
        """Nothing is held by anybody, and nobody is left out."""
        scheduler, ledger = self.scheduler, self.scheduler.ledger
        scheduler.check_integrity()
        self.result.num_checks += 1
        assert not scheduler.running, "a request still runs at the end"
        assert not scheduler.waiting, "a request still waits at the end"
        assert ledger.blocks.num_free == ledger.blocks.size, "KV blocks are held at the end"
        assert ledger.slots.num_free == ledger.slots.size, "state slots are held at the end"
        assert ledger.swapped_bytes == 0, "swapped bytes are held at the end"
        assert all(record.outcome is not None for record in self.result.records), "a request without an outcome"

    # Tokens

    def _tokens(self, prompt: Iterable[int | Segment]) -> list[int]:
        ids: list[int] = []
        for part in prompt:
            if isinstance(part, Segment):
                if part.name not in self._first_ids:
                    self._first_ids[part.name] = self._new_ids()
                first = self._first_ids[part.name]
                ids.extend(range(first, first + part.num_tokens))
            else:
                ids.append(part)
        return ids

    def _new_ids(self) -> int:
        """The first of a range of token ids that nothing else has; a trace's own ids lie below all of them."""
        return next(self._id_spaces) << 32
