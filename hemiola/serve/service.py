"""Service: what all endpoints share. Prompts in, streams of updates out; admission, limits, metrics and the log."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence

from hemiola.config.sampling import SamplingParams
from hemiola.config.serve import ServeConfig
from hemiola.engine.refusal import refuse_impossible
from hemiola.engine.request import Request as EngineRequest
from hemiola.errors import CapacityError, RequestError
from hemiola.front import Front
from hemiola.serve.errors import ApiError, of_request
from hemiola.serve.generation import Generation, Origin
from hemiola.serve.loop import EngineLoop, Job, Message, ShuttingDown
from hemiola.serve.metrics import Metrics
from hemiola.text.tokenizer import Tokenizer

log = logging.getLogger("hemiola.serve")


class Service:
    """front must not be used by anybody else from `start` to `stop`."""

    def __init__(self, front: Front, config: ServeConfig, model_name: str) -> None:
        self.config, self.model_name = config, model_name
        self.tokenizer: Tokenizer | None = front.tokenizer
        self.engine = front.engine
        self._grammars = front.grammars
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
        if self._grammars is not None:
            threading.Thread(target=self._grammars.warm, name="vocabulary", daemon=True).start()

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
            self.loop.fail_all(ShuttingDown())

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
        with_paths: bool = False,
    ) -> Generation:
        """Put prompts to the engine, all or none, and return when it has taken them up.

        names: what the client calls fields of SamplingParams, for errors. Close what is returned.
        Raises: ApiError.
        """
        self._check(prompts, params, names)
        self._admit()
        await self._compile(params, names)
        self._admit()  # again: others have come meanwhile
        log_text = self.tokenizer if self.config.log_requests else None
        generation = Generation(self.loop, self.metrics, origin, self._close, log_text)
        jobs = [
            Job(index, ids, own, generation.receive, priority, with_paths)
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

    async def _compile(self, params: Sequence[SamplingParams], names: Mapping[str, str] | None) -> None:
        """Make the grammars that the requests ask for, beside the event loop and ahead of the engine."""
        if self._grammars is None:
            return
        try:
            for own in {id(own): own for own in params if own.structured is not None}.values():
                await asyncio.to_thread(self._grammars.check, own)
        except RequestError as error:
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

    def _close(self, generation: Generation) -> None:
        self._generations.discard(generation)
        self.metrics.count_open(len(self._generations))

    def _deliver(self, messages: list[Message]) -> None:
        """From the engine's thread."""
        assert self._asyncio is not None, "not started"
        self._asyncio.call_soon_threadsafe(_hand_out, messages)


def _hand_out(messages: list[Message]) -> None:
    for job, message in messages:
        job.receive(job, message)
