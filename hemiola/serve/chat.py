"""/v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from hemiola.serve.answers import ChatAnswer
from hemiola.serve.encoding import DONE, TextEvents, event
from hemiola.serve.errors import ApiError
from hemiola.serve.generation import Generation, Origin
from hemiola.serve.loop import Update
from hemiola.serve.responding import respond
from hemiola.serve.schemas import ChatRequest
from hemiola.serve.service import Service
from hemiola.serve.tokens import chat_logprobs, prompt_logprobs, token_name
from hemiola.serve.turn import Turn, Wish
from hemiola.text.chat_output import ChatDelta


def chat_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        service.check_model(body.model)
        origin = Origin.of(request)
        return await respond(request, origin, _Answering.start(service, body, origin), bool(body.stream))

    return router


@dataclass(frozen=True, slots=True)
class _Answering:
    """One request under way."""

    body: ChatRequest
    turn: Turn
    head: dict[str, Any]

    @classmethod
    async def start(cls, service: Service, body: ChatRequest, origin: Origin) -> _Answering:
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs to be true", param="top_logprobs")
        asked = body.max_completion_tokens
        wish = Wish(
            body,
            body.messages,
            {
                "logprobs": "top_logprobs",
                "effort": "reasoning_effort",
                "max_tokens": "max_tokens" if asked is None else "max_completion_tokens",
                **({"structured.json_schema": "response_format.json_schema.schema"} if body.response_format else {}),
            },
            tools=body.tools,
            tool_choice=body.tool_choice,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            response_format=body.response_format,
            switches=body.chat_template_kwargs,
            effort=body.reasoning_effort,
            thinking_token_budget=body.thinking_token_budget,
            add_generation_prompt=body.add_generation_prompt is not False,
            max_tokens=body.max_tokens if asked is None else asked,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            priority=body.priority or 0,
            with_paths=bool(body.return_metrics),
        )
        turn = await Turn.start(service, wish, origin)
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": service.model_name}
        return cls(body, turn, head)

    @property
    def generation(self) -> Generation:
        return self.turn.generation

    async def result(self) -> dict[str, Any]:
        async for updates in self.generation:
            for _, update in updates:
                self.turn.answers[update.index].add(update)
        answer = {
            **self.head,
            "object": "chat.completion",
            "choices": [self._choice(index, answer) for index, answer in enumerate(self.turn.answers)],
            "usage": self.usage(),
        }
        return answer | self.extras()

    def tell(self) -> _Telling:
        return _Telling(self)

    def _choice(self, index: int, answer: ChatAnswer) -> dict[str, Any]:
        assert answer.finish is not None, "the generation has ended"
        said, calls = answer.message, answer.tool_calls
        message: dict[str, Any] = {
            "role": "assistant",
            "content": said.content if said.content or not calls else None,
            "refusal": None,
        }
        if said.reasoning:
            message |= {"reasoning_content": said.reasoning, "reasoning": said.reasoning}
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        choice = {
            "index": index,
            "message": message,
            "logprobs": {"content": self.chat_logprobs(answer.ids, answer.logprobs)} if self.body.logprobs else None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.finish.stop_reason,
        }
        return choice | _doubt(answer) | ({"token_ids": answer.ids} if self.body.return_token_ids else {})

    def chat_logprobs(self, ids: list[int], logprobs: Any) -> list[Any]:
        tokenizer = self.turn.tokenizer
        name = token_name(tokenizer, self.body.return_tokens_as_token_ids)
        return chat_logprobs(tokenizer, name, ids, logprobs, self.body.top_logprobs or 0)

    def usage(self) -> dict[str, Any]:
        return usage(self.generation, self.turn.num_reasoning_tokens)

    def extras(self) -> dict[str, Any]:
        """Fields beyond OpenAI's that the request asked for."""
        extras: dict[str, Any] = {}
        if (known := self.turn.answers[0].prompt_logprobs) is not None and self.body.prompt_logprobs is not None:
            extras["prompt_logprobs"] = prompt_logprobs(self.turn.tokenizer, known, self.body.prompt_logprobs)
        if self.body.return_token_ids:
            extras["prompt_token_ids"] = self.generation.prompt_ids[0]
        if self.body.return_metrics:
            extras["metrics"] = self.generation.metrics()
        return extras


class _Telling:
    """The answer as chunks; what most updates bring is a text alone."""

    def __init__(self, answering: _Answering) -> None:
        self._answering, self._answers = answering, answering.turn.answers
        self._body = body = answering.body
        options = body.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.include_usage and options.continuous_usage_stats)
        self._adds_to_texts = bool(self._continuous or body.logprobs or body.return_token_ids)
        self._texts = TextEvents(self._text_chunk)

    def begin(self) -> bytes:
        role = {"role": "assistant", "content": ""}
        return b"".join(event(self._chunk(_stream_choice(index, role))) for index in range(len(self._answers)))

    def add(self, updates: Sequence[tuple[int, Update]]) -> bytes:
        return b"".join(part for _, update in updates for part in self._events(update))

    def end(self) -> bytes:
        last: dict[str, Any] = {"usage": self._answering.usage()} if self._with_usage else {}
        last |= self._answering.extras()
        return (event({**self._head, "choices": [], **last}) if last else b"") + DONE

    def fail(self, error: ApiError) -> bytes:
        return event(error.body) + DONE

    def _events(self, update: Update) -> list[bytes]:
        """Log-probabilities and ids go with an update's first chunk, the end's reason with its last."""
        answer = self._answers[update.index]
        deltas = answer.add(update)
        if update.finish is None and not self._adds_to_texts:
            return [self._event(update.index, delta) for delta in deltas]
        choices = [_stream_choice(update.index, _delta(delta)) for delta in deltas]
        if not choices and (self._body.logprobs or self._body.return_token_ids or update.finish):
            choices = [_stream_choice(update.index, {})]
        if choices and self._body.logprobs:
            choices[0]["logprobs"] = {"content": self._answering.chat_logprobs(update.token_ids, update.logprobs)}
        if choices and self._body.return_token_ids:
            choices[0]["token_ids"] = update.token_ids
        if update.finish is not None:
            choices[-1] |= {"finish_reason": answer.finish_reason, "stop_reason": update.finish.stop_reason}
            choices[-1] |= _doubt(answer)
        return [event(self._chunk(choice)) for choice in choices]

    def _event(self, index: int, delta: ChatDelta) -> bytes:
        """Of a delta that nothing goes with."""
        if delta.tool_call is not None:
            return event(self._chunk(_stream_choice(index, _delta(delta))))
        return self._texts.event((index, bool(delta.reasoning)), delta.reasoning or delta.content)

    def _text_chunk(self, kind: tuple[int, bool], text: str) -> dict[str, Any]:
        """kind: the choice, and whether it is reasoning."""
        index, is_reasoning = kind
        delta = ChatDelta(reasoning=text) if is_reasoning else ChatDelta(content=text)
        return self._chunk(_stream_choice(index, _delta(delta)))

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": self._answering.usage() if self._continuous else None} if self._with_usage else {}
        return {**self._head, "choices": [choice], **usage}

    @property
    def _head(self) -> dict[str, Any]:
        return {**self._answering.head, "object": "chat.completion.chunk"}


def usage(generation: Generation, num_reasoning_tokens: int | None = None) -> dict[str, Any]:
    """Of what has come so far."""
    prompt, output = generation.num_prompt_tokens, generation.num_output_tokens
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
    }
    if num_reasoning_tokens is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": num_reasoning_tokens}
    return counts


def _stream_choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _doubt(answer: ChatAnswer) -> dict[str, Any]:
    """A field of a choice, only where it has a call that should not be carried out unseen."""
    return {} if answer.doubtful_call is None else {"doubtful_tool_call": answer.doubtful_call}


def _delta(delta: ChatDelta) -> dict[str, Any]:
    if (call := delta.tool_call) is not None:
        function = {"name": call.name} if call.name is not None else {}
        part: dict[str, Any] = {"index": call.index, "function": {**function, "arguments": call.arguments}}
        return {"tool_calls": [part | ({"id": call.id, "type": "function"} if call.id is not None else {})]}
    if delta.reasoning:
        return {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}
    return {"content": delta.content}
