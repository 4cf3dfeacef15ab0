"""/v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from hemiola.serve.answers import ChatAnswer
from hemiola.serve.encoding import DONE, event
from hemiola.serve.errors import ApiError
from hemiola.serve.generation import Generation, Origin
from hemiola.serve.loop import Update
from hemiola.serve.responding import respond
from hemiola.serve.schemas import ChatRequest
from hemiola.serve.service import Service
from hemiola.serve.tokens import chat_logprobs, prompt_logprobs
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
            "usage": self._usage(),
        }
        return answer | self._extras()

    async def events(self) -> AsyncGenerator[bytes, None]:
        options = self.body.stream_options
        with_usage = bool(options and options.include_usage)
        continuous = bool(options and options.include_usage and options.continuous_usage_stats)

        def chunk(choice: dict[str, Any]) -> bytes:
            usage = {"usage": self._usage() if continuous else None} if with_usage else {}
            return event({**self.head, "object": "chat.completion.chunk", "choices": [choice], **usage})

        role = {"role": "assistant", "content": ""}
        yield b"".join(chunk(_stream_choice(index, role)) for index in range(len(self.turn.answers)))
        async for updates in self.generation:
            yield b"".join(chunk(choice) for _, update in updates for choice in self._stream_choices(update))
        last: dict[str, Any] = {"usage": self._usage()} if with_usage else {}
        if last or self._extras():
            yield event({**self.head, "object": "chat.completion.chunk", "choices": [], **last, **self._extras()})
        yield DONE

    def _stream_choices(self, update: Update) -> list[dict[str, Any]]:
        """The chunks of one update. Log-probabilities and ids go with its first, the end's reason with its last."""
        answer = self.turn.answers[update.index]
        parts = [_delta(delta) for delta in answer.add(update)]
        if not parts and (self.body.logprobs or self.body.return_token_ids or update.finish):
            parts = [{}]
        choices = [_stream_choice(update.index, part) for part in parts]
        if choices and self.body.logprobs:
            choices[0]["logprobs"] = {"content": self._chat_logprobs(update.token_ids, update.logprobs)}
        if choices and self.body.return_token_ids:
            choices[0]["token_ids"] = update.token_ids
        if update.finish is not None:
            choices[-1] |= {"finish_reason": answer.finish_reason, "stop_reason": update.finish.stop_reason}
            choices[-1] |= _doubt(answer)
        return choices

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
            "logprobs": {"content": self._chat_logprobs(answer.ids, answer.logprobs)} if self.body.logprobs else None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.finish.stop_reason,
        }
        return choice | _doubt(answer) | ({"token_ids": answer.ids} if self.body.return_token_ids else {})

    def _chat_logprobs(self, ids: list[int], logprobs: Any) -> list[Any]:
        return chat_logprobs(self.turn.tokenizer, ids, logprobs, self.body.top_logprobs or 0)

    def _usage(self) -> dict[str, Any]:
        return usage(self.generation, self.turn.num_reasoning_tokens)

    def _extras(self) -> dict[str, Any]:
        """Fields beyond OpenAI's that the request asked for."""
        extras: dict[str, Any] = {}
        if (known := self.turn.answers[0].prompt_logprobs) is not None and self.body.prompt_logprobs is not None:
            extras["prompt_logprobs"] = prompt_logprobs(self.turn.tokenizer, known, self.body.prompt_logprobs)
        if self.body.return_token_ids:
            extras["prompt_token_ids"] = self.generation.prompt_ids[0]
        if self.body.return_metrics:
            extras["metrics"] = self.generation.metrics()
        return extras


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
