"""Generation: the answers to one HTTP request's prompts as they come, with their timing and their line in the log."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest

from hemiola.errors import HemiolaError
from hemiola.ops import Path
from hemiola.serve.errors import ApiError, of_engine, of_request
from hemiola.serve.loop import EngineFailed, EngineLoop, Finish, Job, ShuttingDown, Update
from hemiola.serve.metrics import Metrics
from hemiola.text.tokenizer import Tokenizer

log = logging.getLogger("hemiola.serve")


@dataclass(frozen=True, slots=True)
class Origin:
    """The HTTP request behind a generation. arrival_s: time.monotonic()."""

    request_id: str
    endpoint: str
    arrival_s: float

    @classmethod
    def of(cls, request: HttpRequest) -> Origin:
        """A client's own x-request-id is kept where it is short and plain."""
        own = request.headers.get("x-request-id", "")
        is_plain = 0 < len(own) <= 64 and own.isascii() and own.isprintable()
        return cls(own if is_plain else uuid.uuid4().hex, request.scope["path"], time.monotonic())

    @property
    def headers(self) -> dict[str, str]:
        return {"x-request-id": self.request_id}


@dataclass(slots=True)
class _Progress:
    """Of one choice. last_s: time.monotonic() of its last token."""

    num_tokens: int = 0
    last_s: float | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one generation, in seconds since its arrival; None where it did not come so far."""

    queue_s: float | None
    first_token_s: float | None
    last_token_s: float | None


class Generation:
    """The answers to one request's prompts as they come: iterate over it for lists of (prompt index, update).

    closed: called when it is over. log_text: decodes prompts for the log; None keeps all text out of it.
    """

    def __init__(
        self,
        loop: EngineLoop,
        metrics: Metrics,
        origin: Origin,
        closed: Callable[[Generation], None],
        log_text: Tokenizer | None = None,
    ) -> None:
        self._log_text = log_text
        self._loop, self._metrics, self._origin, self._closed = loop, metrics, origin, closed
        self._jobs: list[Job] = []
        self._pending: list[tuple[int, Update]] = []
        self._waiting: asyncio.Future[None] | None = None  # of whoever iterates
        self._accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._error: HemiolaError | None = None
        self._num_open = 0
        self._is_closed = False
        self._texts: list[str] = []
        self._progress: defaultdict[tuple[int, int], _Progress] = defaultdict(_Progress)  # by prompt and choice
        self._first_s: float | None = None
        self.num_cached_tokens = 0
        self.finishes: list[Finish] = []

    async def begin(self, jobs: list[Job], names: Mapping[str, str] | None) -> None:
        self._jobs = jobs
        self._num_open = sum(job.params.n for job in jobs)
        self._loop.submit(jobs)
        try:
            await self._accepted
        except HemiolaError as error:
            self._error = error
            is_ours = isinstance(error, ShuttingDown | EngineFailed)
            raise (_given_up(error) if is_ours else of_request(error, names)) from error

    def receive(self, job: Job, message: Update | HemiolaError | None) -> None:
        """From the event loop, in the order of the steps. What was under way when it was closed is dropped."""
        if self._is_closed:
            return
        if isinstance(message, Update):
            self._observe(job, message)
            self._pending.append((job.index, message))
            self._num_open -= message.finish is not None
        elif message is None:
            if not self._accepted.done():
                self._accepted.set_result(None)
        elif not self._accepted.done():
            self._accepted.set_exception(message)
        else:
            self._error = message
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[tuple[int, Update]]:
        """Everything that has come since. Raises: ApiError when the engine gave up."""
        while not self._pending:
            if self._error is not None:
                raise _given_up(self._error)
            if not self._num_open:
                raise StopAsyncIteration
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        pending, self._pending = self._pending, []
        return pending

    def close(self) -> None:
        """Withdraw what is unfinished, and log. May be called at any time, and twice."""
        if self._is_closed:
            return
        self._is_closed = True
        num_unfinished = sum(job.params.n for job in self._jobs) - len(self.finishes)
        if num_unfinished:
            self._loop.abort(self._jobs)
            self._metrics.finished("error" if self._error else "abort", num_unfinished)
        self._closed(self)
        self._log("failed" if self._error else "abandoned" if num_unfinished else "finished")

    @property
    def prompt_ids(self) -> list[list[int]]:
        return [job.prompt_ids for job in self._jobs]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(job.prompt_ids) for job in self._jobs)

    @property
    def num_output_tokens(self) -> int:
        """Over all choices, ids that ended one included."""
        return sum(progress.num_tokens for progress in self._progress.values())

    @property
    def timing(self) -> Timing:
        scheduled = [job.scheduled_s for job in self._jobs if job.scheduled_s is not None]
        lasts = [progress.last_s for progress in self._progress.values() if progress.last_s is not None]
        times = min(scheduled, default=None), self._first_s, max(lasts, default=None)
        return Timing(*(None if time_s is None else time_s - self._origin.arrival_s for time_s in times))

    def metrics(self) -> dict[str, Any]:
        """For the response of a request that asks: its timing and reuse, and the paths that the engine took between the
        arrival and the end of each of its prompts, whoever else it worked for."""
        timing = self.timing
        paths: Counter[Path] = Counter()
        for job in self._jobs:
            paths.update(job.paths or {})
        return {
            "queue_s": timing.queue_s,
            "time_to_first_token_s": timing.first_token_s,
            "time_to_last_token_s": timing.last_token_s,
            "prompts": [
                {
                    "cached_tokens": finish.num_cached_tokens,
                    "prefix_miss": finish.prefix_miss.reason.value if finish.prefix_miss else None,
                    "missed_tokens": finish.prefix_miss.num_tokens if finish.prefix_miss else 0,
                    "preemptions": finish.num_preemptions,
                }
                for finish in self.finishes
            ],
            "paths": [{**path._asdict(), "calls": count} for path, count in sorted(paths.items()) if count],
        }

    def _log(self, outcome: str) -> None:
        timing = self.timing
        fields: dict[str, object] = {
            "id": self._origin.request_id,
            "endpoint": self._origin.endpoint,
            "outcome": outcome,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "output_tokens": self.num_output_tokens,
            "finish": ",".join(sorted({finish.reason for finish in self.finishes})),
            "queue_s": _rounded(timing.queue_s),
            "first_token_s": _rounded(timing.first_token_s),
            "seconds": _rounded(time.monotonic() - self._origin.arrival_s),
        }
        if (tokenizer := self._log_text) is not None:
            fields["prompts"] = [tokenizer.decode(job.prompt_ids, skip_special_tokens=False) for job in self._jobs]
            fields["output"] = "".join(self._texts)
        log.info("request", extra={"fields": fields})

    def _observe(self, job: Job, update: Update) -> None:
        metrics, progress = self._metrics, self._progress[job.index, update.index]
        if self._log_text is not None:
            self._texts.append(update.text)
        if update.token_ids:
            progress.num_tokens += len(update.token_ids)
            if progress.last_s is not None:
                metrics.inter_token.observe(update.time_s - progress.last_s)
            else:
                metrics.first_token.observe(update.time_s - self._origin.arrival_s)
                self._first_s = self._first_s or update.time_s
            progress.last_s = update.time_s
            metrics.generation_tokens.inc(len(update.token_ids))
        if (finish := update.finish) is not None:
            self.finishes.append(finish)
            if update.index == 0:
                self.num_cached_tokens += finish.num_cached_tokens
            metrics.observe_finish(job, finish, progress.num_tokens, update.time_s, self._origin.arrival_s)


def _given_up(error: HemiolaError) -> ApiError:
    return ApiError(503, str(error)) if isinstance(error, ShuttingDown) else of_engine(str(error))


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
