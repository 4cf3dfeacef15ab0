"""EngineLoop: the thread that owns the front and its engine. Jobs go in through a queue; after each step, one call
hands everything that the step brought to whoever listens.

Nobody else touches the engine while the loop runs. What leaves the thread is immutable, or never written again.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hemiola.cache.prefix import PrefixMiss
from hemiola.config.sampling import SamplingParams
from hemiola.engine.request import FinishReason, RequestStatus, TokenLogprobs
from hemiola.engine.stats import EngineStats
from hemiola.errors import HemiolaError
from hemiola.front import Answer, Delta, Front
from hemiola.ops import Path

SNAPSHOT_SECONDS = 0.25  # how old the published figures may be while the engine is busy
MAX_FAILED_STEPS = 2  # with nothing for anybody in between; then what is open ends with the error

# What a step can raise that another step may survive; the engine has forgotten all cached content then.
_STEP_FAULTS = (
    HemiolaError,
    ArithmeticError,
    AssertionError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Job:
    """One prompt for the engine. index: the listener's number for it.

    receive: called by the listener with what the loop has for this job; the loop itself never calls it.
    scheduled_s: time.monotonic() when the first step that computed something for it began; None before.
    paths: with_paths, once it is finished: the engine's calls from its arrival to its end, whoever they were for.
    """

    index: int
    prompt_ids: list[int]
    params: SamplingParams
    receive: Callable[[Job, Update | HemiolaError | None], None]
    priority: int = 0
    with_paths: bool = False
    scheduled_s: float | None = field(default=None, init=False)
    paths: dict[Path, int] | None = field(default=None, init=False)
    answer: Answer | None = field(default=None, init=False)


@dataclass(frozen=True, slots=True)
class Finish:
    """How a choice ended. reason: see FinishReason. error: what failed, when reason is "error"."""

    reason: str
    stop_reason: int | str | None
    error: str | None
    num_cached_tokens: int
    prefix_miss: PrefixMiss | None
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Update:
    """What one step brought one choice. logprobs: one entry per token id, where they were asked for. prompt_logprobs:
    come with the first token of a prompt's first choice, where they were asked for."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    time_s: float
    finish: Finish | None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine's figures at a moment. paths: calls since the start."""

    stats: EngineStats
    paths: dict[Path, int]


class ShuttingDown(HemiolaError):
    """A request ended because the server does."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class EngineFailed(HemiolaError):
    """A request ended by a fault that is not its own."""

    def __init__(self, what: str, fault: BaseException) -> None:
        super().__init__(f"{what}: {type(fault).__name__}")


Message = tuple[Job, Update | HemiolaError | None]  # None: taken up by the engine
Command = Callable[[], None]


class EngineLoop:
    """deliver: called from the thread with the messages of one step, in order; it must not block.

    snapshot: replaced, never changed; reading it from any thread is safe. num_failed_steps: since the start.
    """

    def __init__(self, front: Front, deliver: Callable[[list[Message]], None]) -> None:
        self._front, self._deliver = front, deliver
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._jobs: dict[Answer, Job] = {}
        self._outbox: list[Message] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False
        self._lock = threading.Lock()  # of what follows, and of the inbox while it is written
        self._ended: HemiolaError | None = None  # why nobody reads the inbox any more
        self._failed_in_a_row = 0
        self.num_failed_steps = 0
        self.snapshot = self._take_snapshot()
        self._snapshot_s = time.monotonic()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End what is open, end the thread and wait for it."""
        self._put(self._stop)
        if self._thread.ident is not None:
            self._thread.join()

    # From any thread

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue prompts, all or none; each receives None when all are taken up, or the first one's error; and at once
        what ended the loop, when something has."""
        if not self._put(lambda: self._add(jobs)):
            self._deliver(self._refusals(jobs))

    def abort(self, jobs: Sequence[Job]) -> None:
        """Withdraw jobs before the next step; they receive nothing more. Finished ones are left alone."""
        self._put(lambda: self._withdraw(jobs))

    def fail_all(self, error: HemiolaError) -> None:
        """End every open job with an error before the next step."""
        self._put(lambda: self._fail_all(error))

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def healthy(self) -> bool:
        """The thread lives, its steps come, and none has failed since the last one that brought somebody something."""
        return self.is_alive and not self._failed_in_a_row and self._front.engine.healthy()

    @property
    def num_waiting(self) -> int:
        """Requests that no step has taken up, those included that the engine has not seen yet."""
        return len(self._front.engine.scheduler.waiting) + self._inbox.qsize()

    def _put(self, command: Command) -> bool:
        """Whether the thread will obey it, or has ended."""
        with self._lock:
            if self._ended is None:
                self._inbox.put(command)
            return self._ended is None

    # In the thread

    def _run(self) -> None:
        why: HemiolaError = ShuttingDown()
        try:
            while not self._stopping:
                self._read_inbox()
                if self._front.has_unfinished and not self._stopping:
                    self._step()
                self._hand_over()
        except BaseException as error:
            why = EngineFailed("the engine has stopped", error)
            raise
        finally:
            self._end(why)

    def _end(self, why: HemiolaError) -> None:
        """Tell everybody who waits, also those whose prompts nobody has read."""
        with self._lock:
            self._ended = why
        try:
            self._fail_all(why)
        finally:
            while not self._inbox.empty():
                self._inbox.get()()
            self._hand_over()

    def _read_inbox(self) -> None:
        """Obey what has come; when there is nothing else to do, wait for something to come."""
        if not self._front.has_unfinished:
            self._publish()
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _hand_over(self) -> None:
        if self._outbox:
            messages, self._outbox = self._outbox, []
            self._deliver(messages)

    def _add(self, jobs: Sequence[Job]) -> None:
        if self._ended is not None:
            self._outbox += self._refusals(jobs)
            return
        answers: list[Answer] = []
        try:
            for job in jobs:
                answers.append(self._front.add(job.prompt_ids, job.params, priority=job.priority))
            calls = self._calls()
        except _STEP_FAULTS as fault:
            error = fault
            if not isinstance(error, HemiolaError):
                log.exception("a request could not be taken up")
                error = EngineFailed("the engine failed", fault)
            self._outbox += [(job, error) for job in jobs]
            self._withdraw_answers(answers)
            return
        for job, answer in zip(jobs, answers, strict=True):
            job.answer = answer
            self._jobs[answer] = job
            if job.with_paths:
                job.paths = {path: -count for path, count in calls.items()}
        self._outbox += [(job, None) for job in jobs]

    def _refusals(self, jobs: Sequence[Job]) -> list[Message]:
        return [(job, self._ended) for job in jobs]

    def _withdraw(self, jobs: Sequence[Job]) -> None:
        answers = [job.answer for job in jobs if job.answer is not None and job.answer in self._jobs]
        for answer in answers:
            del self._jobs[answer]
        self._withdraw_answers(answers)

    def _fail_all(self, error: HemiolaError) -> None:
        self._fail(list(self._jobs), error)

    def _fail(self, answers: Sequence[Answer], error: HemiolaError) -> None:
        """End jobs with an error; whatever their withdrawal does, the listeners will know."""
        self._outbox += [(self._jobs.pop(answer), error) for answer in answers]
        self._withdraw_answers(answers)

    def _withdraw_answers(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            try:
                self._front.abort(answer)
            except _STEP_FAULTS:
                log.exception("a request could not be withdrawn")

    def _stop(self) -> None:
        self._stopping = True

    def _step(self) -> None:
        started_s = time.monotonic()
        try:
            deltas = self._front.step()
        except _STEP_FAULTS as error:
            log.exception("a step failed")
            self.num_failed_steps += 1
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= MAX_FAILED_STEPS:
                self._fail_all(EngineFailed("the engine failed", error))
                self._publish()
            return
        now = time.monotonic()
        for delta in deltas:
            job = self._jobs.get(delta.answer)
            if job is None:  # another of its choices has just ended it
                continue
            if job.scheduled_s is None:
                job.scheduled_s = started_s
            if delta.new_ids or delta.choice.finished:
                self._failed_in_a_row = 0
                try:
                    self._outbox.append((job, _update(delta, now)))
                except _STEP_FAULTS as error:
                    log.exception("an answer could not be told")
                    self._fail([delta.answer], EngineFailed("the engine failed", error))
        # After the loop: an answer's last choices may end in the same step.
        for answer in {delta.answer for delta in deltas if delta.answer.finished} & self._jobs.keys():
            job = self._jobs.pop(answer)
            if job.paths is not None:
                job.paths = {path: count + job.paths.get(path, 0) for path, count in self._calls().items()}
        if now - self._snapshot_s > SNAPSHOT_SECONDS:
            self._publish()

    def _publish(self) -> None:
        self.snapshot = self._take_snapshot()
        self._snapshot_s = time.monotonic()

    def _take_snapshot(self) -> EngineSnapshot:
        engine = self._front.engine
        stats = engine.stats()
        prefix = replace(stats.prefix, misses=dict(stats.prefix.misses), tokens_missed=dict(stats.prefix.tokens_missed))
        stats = replace(
            stats, prefix=prefix, preemptions=replace(stats.preemptions), snapshots=replace(stats.snapshots)
        )
        return EngineSnapshot(stats, self._calls())

    def _calls(self) -> dict[Path, int]:
        return self._front.engine.model.ops.snapshot()


def _update(delta: Delta, now: float) -> Update:
    request = delta.choice.request
    has_logprobs = request.params.logprobs is not None and delta.new_ids
    logprobs = request.logprobs[-len(delta.new_ids) :] if has_logprobs else []
    finish = None
    if request.status is RequestStatus.FINISHED:
        assert request.finish_reason is not None, "finished without a reason"
        finish = Finish(
            request.finish_reason.value,
            request.stop_reason,
            str(request.error) if request.finish_reason is FinishReason.ERROR else None,
            request.num_cached_tokens or 0,
            request.prefix_miss,
            request.num_preemptions,
        )
    is_first = len(request.output_ids) == len(delta.new_ids)
    prompt_logprobs = request.prompt_logprobs if is_first and request.params.prompt_logprobs is not None else None
    return Update(delta.choice.index, delta.text, delta.new_ids, logprobs, now, finish, prompt_logprobs)
