"""/v1/responses through the openai client: items, events, and conversations that come back."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.serve.conftest import Live
from tests.serve.test_chat import CALL

TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "Weather of a place",
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["place"],
    },
}
CHAT_TOOL = {"type": "function", "function": {key: TOOL[key] for key in ("name", "description", "parameters")}}


def text_of(item: Any) -> str:
    return "".join(part.text for part in item.content)


def test_reasoning_and_message_are_items(scripted: Callable[..., Live]) -> None:
    live = scripted({"hi": "so it is\n</think>\nforty two"})
    response = live.openai.responses.create(model="test", input="hi", metadata={"a": "b"})
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert (text_of(response.output[0]), response.output_text) == ("so it is", "forty two")
    assert (response.status, response.metadata) == ("completed", {"a": "b"})
    assert response.usage is not None
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    assert all(item.status == "completed" for item in response.output)


def test_events_build_the_same_response(scripted: Callable[..., Live]) -> None:
    live = scripted({"hi": f"hm\n</think>\nlook:{CALL}\n{CALL}"}, tools=[CHAT_TOOL], max_model_len=4096)
    options: Any = {"model": "test", "input": "hi", "tools": [TOOL]}
    whole = live.openai.responses.create(**options)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    for call in whole.output[2:]:
        assert json.loads(call.arguments) == {"place": "Rome", "days": 2}  # type: ignore[union-attr]
    events = list(live.openai.responses.create(**options, stream=True))
    assert [entry.sequence_number for entry in events] == list(range(len(events)))
    assert [entry.type for entry in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    assert shape(events[-1].response) == shape(whole)
    # Joined from the deltas alone, item by item.
    joined: dict[int, str] = {}
    for entry in events:
        if entry.type.endswith(".delta"):
            joined[entry.output_index] = joined.get(entry.output_index, "") + entry.delta
    assert list(joined.values()) == ["hm", "look:", *(call.arguments for call in whole.output[2:])]
    assert sum(entry.type == "response.output_text.delta" for entry in events) > 1, "it was not streamed"
    added, done = ([e for e in events if e.type == f"response.output_item.{kind}"] for kind in ("added", "done"))
    assert [e.item.status for e in added] == ["in_progress"] * 4
    assert [e.item for e in done] == events[-1].response.output
    # The client's own accumulation agrees.
    with live.openai.responses.stream(**options) as stream:
        assert shape(stream.get_final_response()) == shape(whole)


def shape(response: Any) -> list[Any]:
    items = []
    for item in response.output:
        text = item.arguments if item.type == "function_call" else text_of(item)
        items.append((item.type, item.status, text))
    return [response.status, items]


def test_a_cut_response_is_incomplete(scripted: Callable[..., Live]) -> None:
    live = scripted({"hi": "so it is\n</think>\nforty two"})
    response = live.openai.responses.create(model="test", input="hi", max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    events = list(live.openai.responses.create(model="test", input="hi", max_output_tokens=3, stream=True))
    assert events[-1].type == "response.incomplete"


def test_a_conversation_comes_back_as_items(text_server: Live) -> None:
    conversation: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather in Rome"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"place": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]
    response = text_server.openai.responses.create(
        model="test", instructions="be brief", input=conversation, tools=[TOOL], max_output_tokens=4
    )
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "weather in Rome"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"function": {"name": "weather", "arguments": '{"place": "Rome"}'}}],
        },
        {"role": "tool", "content": "sunny"},
    ]
    prompt = text_server.post("/tokenize", messages=messages, tools=[CHAT_TOOL]).json()
    assert response.usage is not None
    assert response.usage.input_tokens == prompt["count"]
    # What came out goes in again.
    again = text_server.openai.responses.create(
        model="test",
        input=[*conversation, *[item.model_dump(exclude_none=True) for item in response.output], conversation[0]],
        tools=[TOOL],
        max_output_tokens=2,
    )
    assert again.usage is not None
    assert again.usage.output_tokens == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "store": True}, "store"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"input": "x", "temperature": 1, "foo": 1}, "foo"),
        ({"input": "x", "n": 2}, "n"),
    ],
)
def test_errors_name_the_field(text_server: Live, body: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        answer = text_server.post("/v1/responses", **body, stream=stream)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


def test_an_engine_that_gives_up_is_a_failed_response(
    scripted: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    live = scripted({"hi": "so it is\n</think>\nforty two"})
    calls = [0]
    forward = live.service.engine.model.forward

    def failing(*arguments: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] > 3:
            raise RuntimeError("broken")
        return forward(*arguments, **more)

    monkeypatch.setattr(live.service.engine.model, "forward", failing)
    events = list(live.openai.responses.create(model="test", input="hi", stream=True))
    assert events[-1].type == "response.failed"
    calls[0] = 0
    with pytest.raises(openai.InternalServerError):
        live.openai.responses.create(model="test", input="hi")
    calls[0] = 0
    with pytest.raises(openai.APIError):
        list(
            live.openai.chat.completions.create(model="test", messages=[{"role": "user", "content": "hi"}], stream=True)
        )
