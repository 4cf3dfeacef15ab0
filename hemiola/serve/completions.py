"""/v1/completions: plain text, one prompt or many, with echo."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from hemiola.config.sampling import SamplingParams
from hemiola.engine.request import TokenLogprobs
from hemiola.errors import HemiolaError
from hemiola.serve.chat import usage
from hemiola.serve.encoding import DONE, TextEvents, event
from hemiola.serve.errors import ApiError, of_engine, of_request
from hemiola.serve.generation import Generation, Origin
from hemiola.serve.loop import Finish, Update
from hemiola.serve.parameters import STRUCTURED_NAMES, sampling_params
from hemiola.serve.responding import respond
from hemiola.serve.schemas import CompletionRequest
from hemiola.serve.service import Service
from hemiola.serve.tokens import CompletionLogprobs, prompt_logprobs, token_id_text, token_name
from hemiola.text.detokenize import Detokenizer
from hemiola.text.tokenizer import Tokenizer


def completion_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        service.check_model(body.model)
        origin = Origin.of(request)
        return await respond(request, origin, _Answering.start(service, body, origin), bool(body.stream))

    return router


@dataclass(slots=True)
class _Choice:
    """One choice of one prompt. echo: the prompt's text, until it has been shown; None where it is not to be."""

    prompt: int
    echo: str | None
    logprobs: CompletionLogprobs | None
    text: str = ""
    ids: list[int] = field(default_factory=list)
    parts: list[dict[str, Any]] = field(default_factory=list)
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class _Piece:
    """What is shown of a choice at once. logprobs: its parts, where they were asked for. finish: with its last."""

    index: int
    text: str
    ids: list[int]
    logprobs: list[dict[str, Any]]
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class _Answering:
    """One request under way. echo_only: max_tokens is 0; the engine's one token is not shown.

    held: updates of a prompt's choices whose echo needs its log-probabilities, which come with its first choice.
    """

    body: CompletionRequest
    tokenizer: Tokenizer | None
    generation: Generation
    choices: list[_Choice]
    num_choices: int
    echo_only: bool
    head: dict[str, Any]
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)
    held: dict[int, list[Update]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    async def start(cls, service: Service, body: CompletionRequest, origin: Origin) -> _Answering:
        prompts, echoes = await _prompts(service, body)
        echo_only = body.max_tokens == 0 and bool(body.echo)
        params = _params(body, 1 if echo_only else body.max_tokens)
        if service.tokenizer is None and body.logprobs is not None and not body.return_tokens_as_token_ids:
            raise ApiError(
                400,
                "logprobs: this model has no tokenizer to name tokens by text; ask for return_tokens_as_token_ids",
                param="logprobs",
            )
        generation = await service.generate(
            prompts,
            [params] * len(prompts),
            origin=origin,
            names=STRUCTURED_NAMES,
            priority=body.priority or 0,
            with_paths=bool(body.return_metrics),
        )
        try:
            choices = [
                _Choice(prompt, echo, _logprobs(service.tokenizer, body, params, ids, echo))
                for prompt, (ids, echo) in enumerate(zip(prompts, echoes, strict=True))
                for _ in range(params.n)
            ]
        except BaseException:
            generation.close()
            raise
        head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model_name,
        }
        return cls(body, service.tokenizer, generation, choices, params.n, echo_only, head)

    async def result(self) -> dict[str, Any]:
        async for updates in self.generation:
            for prompt, update in updates:
                self.add(prompt, update)
        choices = []
        for index, choice in enumerate(self.choices):
            shown = self.shown(_Piece(index, choice.text, choice.ids, choice.parts, choice.finish))
            if self.body.return_token_ids:
                shown["prompt_token_ids"] = self.generation.prompt_ids[choice.prompt]
            choices.append(shown)
        return {**self.head, "choices": choices, "usage": self.usage(), **self.extras()}

    def tell(self) -> _Telling:
        return _Telling(self)

    def add(self, prompt: int, update: Update) -> list[_Piece]:
        """Take an update; what can be shown now. Raises: ApiError when the engine gave a choice up."""
        pieces = [self._add(prompt, ready) for ready in self._ready(prompt, update)]
        return [piece for piece in pieces if piece is not None]

    def _ready(self, prompt: int, update: Update) -> list[Update]:
        """The updates that can be shown now that this one is there."""
        needs_prompt = bool(self.body.echo) and self.body.logprobs is not None
        if update.prompt_logprobs is not None:
            self.prompt_logprobs[prompt] = update.prompt_logprobs
            return [update, *self.held.pop(prompt, [])]
        if needs_prompt and prompt not in self.prompt_logprobs and not (update.finish and update.finish.error):
            self.held[prompt].append(update)
            return []
        return [update]

    def _add(self, prompt: int, update: Update) -> _Piece | None:
        index = prompt * self.num_choices + update.index
        choice = self.choices[index]
        if update.finish is not None:
            if update.finish.reason == "error":
                raise of_engine(update.finish.error or "the request failed")
            choice.finish = update.finish
        text, ids, logprobs = ("", [], []) if self.echo_only else (update.text, update.token_ids, update.logprobs)
        parts = []
        if choice.echo is not None:
            text = choice.echo + text
            if choice.logprobs is not None:
                parts.append(choice.logprobs.add(self.generation.prompt_ids[prompt], self.prompt_logprobs[prompt]))
            choice.echo = None
        if choice.logprobs is not None and ids:
            parts.append(choice.logprobs.add(ids, logprobs))
        choice.text += text
        choice.ids += ids
        choice.parts += parts
        if not (text or parts or update.finish or (ids and self.body.return_token_ids)):
            return None
        return _Piece(index, text, ids, parts, update.finish)

    def shown(self, piece: _Piece) -> dict[str, Any]:
        choice, finish = self.choices[piece.index], piece.finish
        shown: dict[str, Any] = {
            "index": piece.index,
            "text": piece.text,
            "logprobs": _joined(piece.logprobs) if choice.logprobs is not None else None,
            "finish_reason": None if finish is None else "length" if self.echo_only else finish.reason,
            "stop_reason": None if finish is None or self.echo_only else finish.stop_reason,
        }
        if self.body.return_token_ids:
            shown["token_ids"] = piece.ids
        known, wanted = self.prompt_logprobs.get(choice.prompt), self.body.prompt_logprobs
        if finish is not None and known is not None and wanted is not None:
            shown["prompt_logprobs"] = prompt_logprobs(self.tokenizer, known, wanted)
        return shown

    def usage(self) -> dict[str, Any]:
        counts = usage(self.generation)
        return counts | ({"completion_tokens": 0, "total_tokens": counts["prompt_tokens"]} if self.echo_only else {})

    def extras(self) -> dict[str, Any]:
        return {"metrics": self.generation.metrics()} if self.body.return_metrics else {}


class _Telling:
    """The answer as chunks; what most updates bring is a text alone."""

    def __init__(self, answering: _Answering) -> None:
        self._answering = answering
        body, options = answering.body, answering.body.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.include_usage and options.continuous_usage_stats)
        self._adds_to_texts = bool(self._continuous or body.logprobs is not None or body.return_token_ids)
        self._texts = TextEvents(self._text_chunk)

    def begin(self) -> bytes:
        return b""

    def add(self, updates: Sequence[tuple[int, Update]]) -> bytes:
        add = self._answering.add
        return b"".join(self._event(piece) for prompt, update in updates for piece in add(prompt, update))

    def end(self) -> bytes:
        last = {"usage": self._answering.usage()} if self._with_usage else {}
        last |= self._answering.extras()
        return (event({**self._answering.head, "choices": [], **last}) if last else b"") + DONE

    def fail(self, error: ApiError) -> bytes:
        return event(error.body) + DONE

    def _event(self, piece: _Piece) -> bytes:
        if self._adds_to_texts or piece.finish is not None:
            return event(self._chunk(piece))
        return self._texts.event(piece.index, piece.text)

    def _text_chunk(self, index: int, text: str) -> dict[str, Any]:
        return self._chunk(_Piece(index, text, [], [], None))

    def _chunk(self, piece: _Piece) -> dict[str, Any]:
        usage = {"usage": self._answering.usage() if self._continuous else None} if self._with_usage else {}
        return {**self._answering.head, "choices": [self._answering.shown(piece)], **usage}


async def _prompts(service: Service, body: CompletionRequest) -> tuple[list[list[int]], list[str | None]]:
    """Ids of every prompt, and what to echo of it. Raises: ApiError."""
    given: list[str | list[int]]
    if isinstance(body.prompt, str):
        given = [body.prompt]
    elif body.prompt and all(isinstance(item, int) for item in body.prompt):
        given = [cast(list[int], body.prompt)]
    else:
        given = cast("list[str | list[int]]", body.prompt)
    if not 0 < len(given) <= service.config.max_prompts:
        raise ApiError(400, f"prompt: {len(given)} prompts, not 1 to {service.config.max_prompts}", param="prompt")

    def encode() -> list[list[int]]:
        special = body.add_special_tokens is not False
        return [service.need_tokenizer().encode(p, special) if isinstance(p, str) else p for p in given]

    try:
        prompts = await asyncio.to_thread(encode)
    except HemiolaError as error:
        raise of_request(error) from error
    for index, ids in enumerate(prompts):
        where = "prompt" if isinstance(body.prompt, str) or len(given) == 1 else f"prompt[{index}]"
        if not ids:
            raise ApiError(400, f"{where}: no token", param=where)
        for position, token in enumerate(ids):
            if not 0 <= token < service.engine.vocab_size:
                raise ApiError(400, f"{where}: no such token id {token}, at position {position}", param=where)
    if not body.echo:
        return prompts, [None] * len(prompts)
    tokenizer = service.need_tokenizer()
    return prompts, [p if isinstance(p, str) else tokenizer.decode(p, False) for p in given]


def _params(body: CompletionRequest, max_tokens: int | None) -> SamplingParams:
    params = sampling_params(body, max_tokens=max_tokens, logprobs=body.logprobs)
    if body.echo and body.logprobs is not None:
        return replace(params, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    return params


def _logprobs(
    tokenizer: Tokenizer | None, body: CompletionRequest, params: SamplingParams, ids: list[int], echo: str | None
) -> CompletionLogprobs | None:
    if body.logprobs is None:
        return None
    if tokenizer is None:
        return CompletionLogprobs(token_id_text, body.logprobs, None)
    # Offsets count in the text that is shown: a prompt may have got special tokens that are not in its text.
    shows_special = echo is not None and tokenizer.decode(ids, skip_special_tokens=False) == echo
    detokenizer = Detokenizer(tokenizer, params.skip_special_tokens and not shows_special)
    return CompletionLogprobs(token_name(tokenizer, body.return_tokens_as_token_ids), body.logprobs, detokenizer)


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {key: [entry for part in parts for entry in part[key]] for key in keys}
