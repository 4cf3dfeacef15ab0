"""/v1/responses: the same turns as chat completions, told as items and events. Nothing is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from hemiola.serve.encoding import event
from hemiola.serve.errors import ApiError
from hemiola.serve.generation import Generation, Origin
from hemiola.serve.loop import Update
from hemiola.serve.responding import respond
from hemiola.serve.schemas import (
    AssistantMessage,
    FlatJsonSchemaFormat,
    FlatNamedTool,
    Function,
    FunctionCall,
    FunctionCallItem,
    FunctionOutputItem,
    InputText,
    Item,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    MessageItem,
    NamedFunction,
    NamedTool,
    ReasoningItem,
    ResponseFormat,
    ResponsesRequest,
    SystemMessage,
    Tool,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from hemiola.serve.service import Service
from hemiola.serve.turn import Turn, Wish
from hemiola.text.chat_output import ChatDelta

Event = dict[str, Any]


def response_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/responses")
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        service.check_model(body.model)
        origin = Origin.of(request)
        return await respond(request, origin, _Answering.start(service, body, origin), bool(body.stream))

    return router


@dataclass(frozen=True, slots=True)
class _Answering:
    """One request under way."""

    turn: Turn
    output: _Output
    head: dict[str, Any]
    with_metrics: bool

    @classmethod
    async def start(cls, service: Service, body: ResponsesRequest, origin: Origin) -> _Answering:
        reasoning = body.reasoning
        wish = Wish(
            body,
            _messages(body),
            {
                "max_tokens": "max_output_tokens",
                "effort": "reasoning.effort",
                "response_format": "text.format",
                **({"structured.json_schema": "text.format.schema"} if body.text else {}),
            },
            tools=[_tool(tool) for tool in body.tools] if body.tools else None,
            tool_choice=_tool_choice(body),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            response_format=_format(body),
            switches=body.chat_template_kwargs,
            effort=reasoning.effort if reasoning else None,
            thinking_token_budget=body.thinking_token_budget,
            max_tokens=body.max_output_tokens,
            priority=body.priority or 0,
            with_paths=bool(body.return_metrics),
        )
        turn = await Turn.start(service, wish, origin)
        return cls(turn, _Output(), _head(service, body), bool(body.return_metrics))

    @property
    def generation(self) -> Generation:
        return self.turn.generation

    async def result(self) -> dict[str, Any]:
        async for updates in self.generation:
            self.add(updates)
        return self.response()

    def tell(self) -> _Telling:
        return _Telling(self)

    def add(self, updates: Sequence[tuple[int, Update]]) -> list[Event]:
        """The events of the output's items for what a step brought."""
        answer = self.turn.answers[0]
        events = [e for _, update in updates for delta in answer.add(update) for e in self.output.add(delta)]
        if answer.finish is not None:
            events += self.output.end(answer.finish_reason == "length")
            if answer.doubtful_call is not None:
                self.output.doubt(answer.doubtful_call)
        return events

    def response(self) -> dict[str, Any]:
        """The response as it stands."""
        answer, generation = self.turn.answers[0], self.generation
        response = {**self.head, "output": self.output.items, "status": "in_progress"}
        if answer.finish is None:
            return response
        is_cut = answer.finish_reason == "length"
        response |= {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "completed_at": int(time.time()),
            "usage": {
                "input_tokens": generation.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": generation.num_cached_tokens, "cache_write_tokens": 0},
                "output_tokens": generation.num_output_tokens,
                "output_tokens_details": {"reasoning_tokens": self.turn.num_reasoning_tokens},
                "total_tokens": generation.num_prompt_tokens + generation.num_output_tokens,
            },
        }
        return response | ({"metrics": generation.metrics()} if self.with_metrics else {})


class _Telling:
    """The response as numbered events."""

    def __init__(self, answering: _Answering) -> None:
        self._answering = answering
        self._number = 0

    def begin(self) -> bytes:
        begun = self._answering.response()
        return self._numbered([{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")])

    def add(self, updates: Sequence[tuple[int, Update]]) -> bytes:
        return self._numbered(self._answering.add(updates))

    def end(self) -> bytes:
        whole = self._answering.response()
        return self._numbered([{"type": f"response.{whole['status']}", "response": whole}])

    def fail(self, error: ApiError) -> bytes:
        failed = {"status": "failed", "error": {"code": "server_error", "message": error.message}}
        return self._numbered([{"type": "response.failed", "response": self._answering.response() | failed}])

    def _numbered(self, events: Sequence[Event]) -> bytes:
        data = b""
        for number, entry in enumerate(events, self._number):
            data += event({**entry, "sequence_number": number}, entry["type"])
        self._number += len(events)
        return data


@dataclass(slots=True)
class _Output:
    """The items of a response while they grow: each run of reasoning, of content, and each call is one."""

    items: list[dict[str, Any]] = field(default_factory=list)
    _open: str | None = None  # what the last item is made of, while it may grow

    def add(self, delta: ChatDelta) -> Iterator[Event]:
        call = delta.tool_call
        kind = f"call {call.index}" if call is not None else "reasoning" if delta.reasoning else "content"
        if kind != self._open:
            yield from self.end()
            if call is not None:
                name, call_id = call.name or "", call.id or ""
                yield from self._begin(
                    kind, "fc", {"type": "function_call", "call_id": call_id, "name": name, "arguments": ""}, None
                )
            elif delta.reasoning:
                yield from self._begin(
                    kind,
                    "rs",
                    {"type": "reasoning", "summary": [], "content": []},
                    {"type": "reasoning_text", "text": ""},
                )
            else:
                yield from self._begin(
                    kind,
                    "msg",
                    {"type": "message", "role": "assistant", "content": []},
                    {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
                )
        item = self.items[-1]
        if call is not None:
            item["arguments"] += call.arguments
            if call.arguments:
                yield self._event("response.function_call_arguments.delta", delta=call.arguments)
        else:
            text = delta.reasoning or delta.content
            item["content"][0]["text"] += text
            yield self._part_event(f"response.{item['content'][0]['type']}.delta", delta=text)

    def end(self, cut: bool = False) -> Iterator[Event]:
        """Nothing more for the open item. cut: the answer ended with it, by its token limit."""
        if self._open is None:
            return
        self._open = None
        item = self.items[-1]
        item["status"] = "incomplete" if cut else "completed"
        if item["type"] == "function_call":
            yield self._event("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"])
        else:
            part = item["content"][0]
            yield self._part_event(f"response.{part['type']}.done", text=part["text"])
            yield self._event("response.content_part.done", content_index=0, part=dict(part))
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": dict(item)}

    def doubt(self, index: int) -> None:
        """A call turned out to be cut short after it was done: the whole response says so."""
        calls = [item for item in self.items if item["type"] == "function_call"]
        calls[index]["status"] = "incomplete"

    def _begin(self, kind: str, prefix: str, item: dict[str, Any], part: dict[str, Any] | None) -> Iterator[Event]:
        self._open = kind
        self.items.append({"id": f"{prefix}_{uuid.uuid4().hex}", **item, "status": "in_progress"})
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": _copy(self.items[-1])}
        if part is not None:
            self.items[-1]["content"] = [part]
            yield self._event("response.content_part.added", content_index=0, part=dict(part))

    def _event(self, event_type: str, **more: Any) -> Event:
        return {"type": event_type, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **more}

    def _part_event(self, event_type: str, **more: Any) -> Event:
        logprobs: Event = {"logprobs": []} if "output_text" in event_type else {}
        return self._event(event_type, content_index=0, **more, **logprobs)


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, list) else value for key, value in item.items()}


def _head(service: Service, body: ResponsesRequest) -> dict[str, Any]:
    """What is known from the beginning; settings are given back as they hold."""
    dumped = body.model_dump(include={"tools", "tool_choice", "text", "reasoning"}, exclude_none=True, by_alias=True)
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": service.model_name,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": dumped.get("reasoning", {}),
        "store": False,
        "temperature": body.temperature,
        "text": dumped.get("text", {"format": {"type": "text"}}),
        "tool_choice": dumped.get("tool_choice", "auto"),
        "tools": dumped.get("tools", []),
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _messages(body: ResponsesRequest) -> list[Message]:
    """Items as messages: what the model said in one turn, reasoning, text and calls, is one message."""
    messages: list[Message] = []
    if body.instructions is not None:
        messages.append(SystemMessage(role="system", content=body.instructions))
    items: Sequence[Item] = (
        [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    )
    turn: AssistantMessage | None = None
    for item in items:
        is_models = not isinstance(item, FunctionOutputItem) and getattr(item, "role", "assistant") == "assistant"
        if not is_models:
            turn = None
        elif turn is None:
            turn = AssistantMessage(role="assistant", content="")
            messages.append(turn)
        match item:
            case MessageItem(role="assistant") if turn is not None:
                turn.content = f"{turn.content}{_text(item.content)}"
            case MessageItem(role="user"):
                messages.append(UserMessage(role="user", content=_text(item.content)))
            case MessageItem():
                messages.append(SystemMessage(role="system", content=_text(item.content)))
            case FunctionOutputItem():
                messages.append(ToolMessage(role="tool", content=_text(item.output), tool_call_id=item.call_id))
            case FunctionCallItem() if turn is not None:
                function = FunctionCall(name=item.name, arguments=item.arguments)
                turn.tool_calls = [*(turn.tool_calls or []), ToolCall(id=item.call_id, function=function)]
            case ReasoningItem() if turn is not None:
                said = "".join(part.text for part in item.content or item.summary or [])
                turn.reasoning_content = (turn.reasoning_content or "") + said
    return messages


def _text(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _tool(tool: Any) -> Tool:
    return Tool(type="function", function=Function(**tool.model_dump(exclude={"type"})))


def _tool_choice(body: ResponsesRequest) -> str | NamedTool | None:
    choice = body.tool_choice
    if isinstance(choice, FlatNamedTool):
        return NamedTool(type="function", function=NamedFunction(name=choice.name))
    return choice


def _format(body: ResponsesRequest) -> ResponseFormat | None:
    form = body.text.format if body.text else None
    if isinstance(form, FlatJsonSchemaFormat):
        schema = JsonSchema(**form.model_dump(by_alias=True, exclude={"type"}))
        return JsonSchemaFormat(type="json_schema", json_schema=schema)
    return form
