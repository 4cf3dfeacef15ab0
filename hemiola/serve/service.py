"""Service: what all endpoints share. Prompts in, streams of updates out; admission, limits, metrics and the log."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest

from hemiola.config.sampling import SamplingParams
from hemiola.config.serve import ServeConfig
from hemiola.engine.refusal import refuse_impossible
from hemiola.engine.request import Request as EngineRequest
from hemiola.errors import CapacityError, HemiolaError, RequestError
from hemiola.front import Front
from hemiola.ops import Path
from hemiola.serve.errors import ApiError, of_engine, of_request
from hemiola.serve.loop import EngineLoop, Finish, Job, Message, ThinkingBudget, Update
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
        return cls(own if is_plain else uuid.uuid4().hex, request.url.path, time.monotonic())

    @property
    def headers(self) -> dict[str, str]:
        return {"x-request-id": self.request_id}


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one generation, in seconds since its arrival; None where it did not come so far."""

    queue_s: float | None
    first_token_s: float | None
    last_token_s: float | None


class Service:
    """front must not be used by anybody else from `start` to `stop`."""

    def __init__(self, front: Front, config: ServeConfig, model_name: str) -> None:
        self.config, self.model_name = config, model_name
        self.tokenizer: Tokenizer | None = front.tokenizer
        self.engine = front.engine
        self.loop = EngineLoop(front, self._deliver)
        self.metrics = Metrics(self.loop, model_name)
        self.created_s = int(time.time())
        self.is_draining = False
        self._generations: set[Generation] = set()
        self._asyncio: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin to run requests; from the event loop that will serve."""
        self._asyncio = asyncio.get_running_loop()
        self.loop.start()

    async def stop(self) -> None:
        await asyncio.to_thread(self.loop.stop)

    async def drain(self) -> None:
        """Take nothing new, let what runs finish, and end with an error what has not after drain_seconds."""
        self.is_draining = True
        deadline = time.monotonic() + self.config.drain_seconds
        while self._generations and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self._generations:
            log.warning("drain limit reached", extra={"fields": {"open": len(self._generations)}})
            self.loop.fail_all(RequestError("the server is shutting down"))

    @property
    def healthy(self) -> bool:
        return self.loop.healthy and not self.is_draining

    def check_model(self, name: str | None) -> None:
        """Raises: ApiError 404 for a model that is not served here."""
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"there is no model {ascii(name)[:200]} here; this server serves {self.model_name}",
                param="model",
                code="model_not_found",
            )

    def need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer: only prompts of token ids can be answered")
        return self.tokenizer

    def room_for_output(self, prompt_ids: Sequence[int]) -> int:
        """New tokens that a prompt leaves room for, in the model's length and in the caches; at least 1."""
        plan, room = self.engine.plan, self.engine.max_model_len
        if plan.block_bytes:
            room = min(room, plan.num_blocks * plan.block_size)
        return max(1, room - len(prompt_ids))

    async def generate(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        *,
        origin: Origin,
        names: Mapping[str, str] | None = None,
        priority: int = 0,
        thinking_budget: ThinkingBudget | None = None,
        with_paths: bool = False,
    ) -> Generation:
        """Put prompts to the engine, all or none, and return when it has taken them up.

        names: what the client calls fields of SamplingParams, for errors. Close what is returned.
        Raises: ApiError.
        """
        self._check(prompts, params, names)
        self._admit()
        generation = Generation(self, origin)
        jobs = [
            Job(index, ids, own, generation.receive, thinking_budget, priority, with_paths)
            for index, (ids, own) in enumerate(zip(prompts, params, strict=True))
        ]
        self._generations.add(generation)
        self.metrics.count_open(len(self._generations))
        try:
            await generation.begin(jobs, names)
        except BaseException:
            generation.close()
            raise
        return generation

    def _check(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], names: Mapping[str, str] | None
    ) -> None:
        """What can be refused without the engine."""
        config = self.config
        if sum(own.n for own in params) > config.max_choices:
            raise ApiError(400, f"n: more than {config.max_choices} choices in one request", param="n")
        for ids, own in zip(prompts, params, strict=True):
            if config.max_prompt_tokens is not None and len(ids) > config.max_prompt_tokens:
                raise ApiError(
                    413,
                    f"a prompt of {len(ids):,} tokens; this server takes {config.max_prompt_tokens:,}",
                    code="prompt_too_long",
                )
            for field in ("logprobs", "prompt_logprobs"):
                count = getattr(own, field)
                if count is not None and not 0 <= count <= config.max_logprobs:
                    name = (names or {}).get(field, field)
                    raise ApiError(400, f"{name}: {count} is not in 0 to {config.max_logprobs}", param=name)
            try:
                own.validate_for(self.engine.vocab_size)
                refuse_impossible(EngineRequest("request-0", ids, own, 0), self.engine.plan, self.engine.max_model_len)
            except (RequestError, CapacityError) as error:
                raise of_request(error, names) from error

    def _admit(self) -> None:
        wait = self.config.retry_after_s
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after_s=wait)
        if not self.loop.is_alive:
            raise ApiError(503, "the engine has stopped", code="engine_stopped")
        if len(self._generations) >= self.config.max_streams:
            self.metrics.refused("streams")
            raise ApiError(
                429, f"{self.config.max_streams} requests are under way", code="too_many_streams", retry_after_s=wait
            )
        if self.loop.num_waiting >= self.config.max_waiting:
            self.metrics.refused("queue")
            raise ApiError(
                429, f"{self.config.max_waiting} requests are waiting", code="queue_full", retry_after_s=wait
            )

    def close(self, generation: Generation) -> None:
        self._generations.discard(generation)
        self.metrics.count_open(len(self._generations))

    def _deliver(self, messages: list[Message]) -> None:
        """From the engine's thread."""
        assert self._asyncio is not None, "not started"
        self._asyncio.call_soon_threadsafe(_hand_out, messages)


def _hand_out(messages: list[Message]) -> None:
    for job, message in messages:
        job.receive(job, message)


class Generation:
    """The answers to one request's prompts as they come: iterate over it for lists of (prompt index, update)."""

    def __init__(self, service: Service, origin: Origin) -> None:
        self._service, self._origin = service, origin
        self._jobs: list[Job] = []
        self._pending: list[tuple[int, Update]] = []
        self._wake = asyncio.Event()
        self._accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._error: HemiolaError | None = None
        self._num_open = 0
        self._is_closed = False
        self._texts: list[str] = []
        self._last_s: dict[tuple[int, int], float] = {}  # by prompt and choice
        self._num_tokens: Counter[tuple[int, int]] = Counter()
        self._first_s: float | None = None
        self.num_cached_tokens = 0
        self.finishes: list[Finish] = []

    async def begin(self, jobs: list[Job], names: Mapping[str, str] | None) -> None:
        self._jobs = jobs
        self._num_open = sum(job.params.n for job in jobs)
        self._service.loop.submit(jobs)
        try:
            await self._accepted
        except HemiolaError as error:
            self._error = error
            raise of_request(error, names) from error

    def receive(self, job: Job, message: Update | HemiolaError | None) -> None:
        """From the event loop, in the order of the steps."""
        if message is None or isinstance(message, HemiolaError):
            if not self._accepted.done():
                if message is None:
                    self._accepted.set_result(None)
                else:
                    self._accepted.set_exception(message)
            elif message is not None:
                self._error = message
                self._wake.set()
            return
        self._observe(job, message)
        self._pending.append((job.index, message))
        self._wake.set()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[tuple[int, Update]]:
        """Everything that has come since. Raises: ApiError when the engine gave up."""
        while not self._pending:
            if self._error is not None:
                shutting_down = self._service.is_draining
                raise ApiError(503, str(self._error)) if shutting_down else of_engine(str(self._error))
            if not self._num_open:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        pending, self._pending = self._pending, []
        self._num_open -= sum(update.finish is not None for _, update in pending)
        return pending

    def close(self) -> None:
        """Withdraw what is unfinished, and log. May be called at any time, and twice."""
        if self._is_closed:
            return
        self._is_closed = True
        num_unfinished = sum(job.params.n for job in self._jobs) - len(self.finishes)
        if num_unfinished:
            self._service.loop.abort(self._jobs)
            self._service.metrics.finished("error" if self._error else "abort", num_unfinished)
        self._service.close(self)
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
        return self._num_tokens.total()

    @property
    def timing(self) -> Timing:
        scheduled = [job.scheduled_s for job in self._jobs if job.scheduled_s is not None]
        times = min(scheduled, default=None), self._first_s, max(self._last_s.values(), default=None)
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
        if self._service.config.log_requests and (tokenizer := self._service.tokenizer) is not None:
            fields["prompts"] = [tokenizer.decode(job.prompt_ids, skip_special_tokens=False) for job in self._jobs]
            fields["output"] = "".join(self._texts)
        log.info("request", extra={"fields": fields})

    def _observe(self, job: Job, update: Update) -> None:
        metrics = self._service.metrics
        key = job.index, update.index
        if self._service.config.log_requests:
            self._texts.append(update.text)
        if update.token_ids:
            self._num_tokens[key] += len(update.token_ids)
            if key in self._last_s:
                metrics.inter_token.observe(update.time_s - self._last_s[key])
            else:
                metrics.first_token.observe(update.time_s - self._origin.arrival_s)
                self._first_s = self._first_s or update.time_s
            self._last_s[key] = update.time_s
            metrics.generation_tokens.inc(len(update.token_ids))
        if (finish := update.finish) is not None:
            self.finishes.append(finish)
            if update.index == 0:
                self.num_cached_tokens += finish.num_cached_tokens
            metrics.observe_finish(job, finish, self._num_tokens[key], update.time_s, self._origin.arrival_s)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
