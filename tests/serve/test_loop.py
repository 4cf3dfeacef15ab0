"""EngineLoop alone: what goes in from other threads, and what comes out, step by step."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hemiola.config.sampling import SamplingParams
from hemiola.engine.request import FinishReason
from hemiola.errors import CapacityError, HemiolaError
from hemiola.front import Delta, Front
from hemiola.model.batch import ForwardBatch
from hemiola.serve.loop import EngineFailed, EngineLoop, Job, Message, Update, _update
from hemiola.text.output import OutputText
from hemiola.text.tokenizer import Tokenizer
from tests.support.scripted_model import scripted_front

LONG = [100, *([101] * 150)]


class Running:
    """A loop and what it delivers."""

    def __init__(self, front: Front) -> None:
        self.front = front
        self.batches: queue.Queue[list[Message]] = queue.Queue()
        self.loop = EngineLoop(front, self.batches.put)

    def job(self, prompt_ids: list[int], **params: Any) -> Job:
        return Job(0, prompt_ids, SamplingParams(**params), lambda job, message: None)

    def collect(self, job: Job) -> list[Update | HemiolaError | None]:
        """Everything for one job up to its end."""
        got: list[Update | HemiolaError | None] = []
        while True:
            for owner, message in self.batches.get(timeout=10):
                if owner is job:
                    got.append(message)
                    if isinstance(message, HemiolaError) or (message is not None and message.finish is not None):
                        return got


@pytest.fixture
def run(text_tokenizer: Tokenizer) -> Iterator[Callable[..., Running]]:
    loops: list[EngineLoop] = []

    def start(scripts: Any, **settings: Any) -> Running:
        running = Running(scripted_front(scripts, text_tokenizer, **settings))
        loops.append(running.loop)
        running.loop.start()
        return running

    yield start
    for loop in loops:
        loop.stop()
        assert not loop.is_alive


def broken(*arguments: Any, **more: Any) -> Any:
    raise RuntimeError("broken")


def updates(messages: list[Update | HemiolaError | None]) -> list[Update]:
    return [message for message in messages if isinstance(message, Update)]


def test_updates_come_token_by_token_and_end(run: Callable[..., Running]) -> None:
    running = run({(20, 21): [100, 101, 11]})
    job = running.job([20, 21], max_tokens=9, logprobs=0)
    running.loop.submit([job])
    taken_up, *rest = running.collect(job)
    assert taken_up is None
    assert [update.token_ids for update in updates(rest)] == [[100], [101], [11]]
    assert [[entry[0][0] for entry in update.logprobs] for update in updates(rest)] == [[100], [101], [11]]
    finish = updates(rest)[-1].finish
    assert finish is not None
    assert finish.reason == FinishReason.STOP.value
    assert job.scheduled_s is not None


def test_all_or_none_of_the_jobs_are_taken(run: Callable[..., Running]) -> None:
    running = run({(20,): [100, 11]}, max_model_len=16)
    good, bad = running.job([20], max_tokens=4), running.job([20], max_tokens=400)
    running.loop.submit([good, bad])
    assert isinstance(running.collect(good)[0], CapacityError)
    assert not running.front.engine.has_unfinished
    again = running.job([20], max_tokens=4)
    running.loop.submit([again])
    assert len(updates(running.collect(again))) == 2


def test_an_abort_frees_before_the_next_step(run: Callable[..., Running]) -> None:
    running = run({(20,): LONG})
    job = running.job([20], max_tokens=140)
    running.loop.submit([job])
    running.batches.get(timeout=10)
    running.loop.abort([job])
    running.loop.abort([job])
    other = running.job([20], max_tokens=2)
    running.loop.submit([other])
    running.collect(other)
    engine = running.front.engine
    assert not engine.has_unfinished
    engine.check_integrity()
    seen = engine.stats().num_decode_tokens
    assert seen < 100, "the aborted request went on"


def test_a_failed_step_is_tried_again_and_two_end_the_requests(
    run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = run({(20,): [100, 101, 11]})
    forward, failures = running.front.engine.model.forward, [1]

    def failing(*arguments: Any) -> Any:
        if failures[0] > 0:
            failures[0] -= 1
            raise RuntimeError("broken")
        return forward(*arguments)

    monkeypatch.setattr(running.front.engine.model, "forward", failing)
    job = running.job([20], max_tokens=9)
    running.loop.submit([job])
    assert [update.token_ids for update in updates(running.collect(job))] == [[100], [101], [11]]
    assert running.loop.healthy
    assert running.loop.num_failed_steps == 1
    failures[0] = 2
    job = running.job([20], max_tokens=9)
    running.loop.submit([job])
    assert isinstance(running.collect(job)[-1], EngineFailed)
    assert not running.loop.healthy
    job = running.job([20], max_tokens=9)
    running.loop.submit([job])
    assert len(updates(running.collect(job))) == 3
    assert running.loop.healthy


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_no_step_may_raise_ends_the_thread_and_every_request(
    run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = run({(20,): [100, 11]})

    def ends(*arguments: Any) -> Any:
        raise SystemError("out of nowhere")

    monkeypatch.setattr(running.front.engine.model, "forward", ends)
    job = running.job([20], max_tokens=9)
    running.loop.submit([job])
    assert isinstance(running.collect(job)[-1], EngineFailed)
    running.loop._thread.join(10)
    assert not running.loop.is_alive
    assert not running.loop.healthy


def test_a_step_that_never_succeeds_ends_its_request_also_where_earlier_ones_do(
    run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failure a prompt begins again: its first steps succeed each time, and bring nobody anything."""
    running = run({}, max_num_batched_tokens=16)
    forward = running.front.engine.model.forward

    def failing(batch: ForwardBatch, *arguments: Any) -> Any:
        if batch.num_computed.max() >= 32:
            raise RuntimeError("broken")
        return forward(batch, *arguments)

    monkeypatch.setattr(running.front.engine.model, "forward", failing)
    job = running.job([20] * 40, max_tokens=9)
    running.loop.submit([job])
    assert isinstance(running.collect(job)[-1], EngineFailed)
    assert running.loop.num_failed_steps == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whoever_waits_is_told_that_the_thread_has_ended(
    run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that run, though they cannot be withdrawn; those that nobody has taken up; and those that come later."""
    running = run({(20,): LONG})
    first, second, unread, late = (running.job([20], max_tokens=9) for _ in range(4))

    def ends(*arguments: Any) -> Any:
        running.loop.submit([unread])
        raise SystemError("out of nowhere")

    monkeypatch.setattr(running.front.engine.model, "forward", ends)
    monkeypatch.setattr(running.front, "abort", broken)
    running.loop.submit([first, second])
    told: dict[Job, Update | HemiolaError | None] = {}
    while len(told) < 3:
        told |= {job: error for job, error in running.batches.get(timeout=5) if error is not None}
    running.loop._thread.join(10)
    running.loop.submit([late])
    told |= dict(running.batches.get(timeout=5))
    assert set(told) == {first, second, unread, late}
    assert all(isinstance(error, EngineFailed) for error in told.values())


def test_what_cannot_be_withdrawn_or_taken_up_ends_nobody_else(
    run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = run({(20,): LONG})
    left, refused, other = running.job([20], max_tokens=90), running.job([20]), running.job([20], max_tokens=9)
    running.loop.submit([left])
    running.batches.get(timeout=5)
    with monkeypatch.context() as patches:
        patches.setattr(running.front, "add", broken)
        patches.setattr(running.front, "abort", broken)
        running.loop.abort([left])
        running.loop.submit([refused])
        assert isinstance(running.collect(refused)[-1], EngineFailed)
    running.loop.submit([other])
    assert len(updates(running.collect(other))) == 9


def test_an_answer_that_cannot_be_told_ends_alone(run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    running = run({(20,): LONG, (21,): LONG})
    bad, good = running.job([20], max_tokens=9), running.job([21], max_tokens=9)

    def update(delta: Delta, now: float) -> Update:
        return broken() if delta.answer.prompt_ids == [20] else _update(delta, now)

    monkeypatch.setattr("hemiola.serve.loop._update", update)
    running.loop.submit([bad, good])
    assert len(updates(running.collect(good))) == 9
    assert bad.answer is not None
    assert bad.answer.choices[0].request.finish_reason is FinishReason.ABORT
    assert running.loop.is_alive


def test_an_answer_whose_text_cannot_be_made_ends_alone(
    run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with the id that ends it, when the engine is already done with it."""
    push = OutputText.push

    def failing(output: OutputText, ids: list[int], *, ends: bool) -> str:
        return broken() if ends or 103 in ids else push(output, ids, ends=ends)

    monkeypatch.setattr(OutputText, "push", failing)
    running = run({(20,): [100, 103, 101], (21,): [100, 11], (22,): LONG})
    jobs = [running.job([prompt], max_tokens=9) for prompt in (20, 21, 22)]
    running.loop.submit(jobs)
    finishes: dict[Job, tuple[str, str]] = {}
    while len(finishes) < 3:
        for job, update in running.batches.get(timeout=5):
            if isinstance(update, Update) and update.finish is not None:
                finishes[job] = (update.finish.reason, (update.finish.error or "").rpartition(": ")[2])
    assert [finishes[job] for job in jobs] == [("error", "broken"), ("error", "broken"), ("length", "")]
    assert running.loop.num_failed_steps == 0
    assert not running.front.engine.has_unfinished


def test_figures_are_there_when_it_is_idle(run: Callable[..., Running]) -> None:
    running = run({(20,): [100, 11]})
    job = running.job([20], max_tokens=9)
    job.with_paths = True
    running.loop.submit([job])
    running.collect(job)
    running.loop.stop()
    stats = running.loop.snapshot.stats
    assert (stats.num_running, stats.prefix.prompts, stats.slots_free) == (0, 1, stats.slots_total)
    assert job.paths is not None
    assert sum(job.paths.values()) == sum(running.loop.snapshot.paths.values()) > 0
