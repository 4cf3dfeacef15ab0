"""Outputs of a required form, through HTTP: the tiny model says nothing sensible, so whatever is valid was enforced."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hemiola.config.engine import EngineConfig
from hemiola.front import Front
from hemiola.loading import load
from tests.serve.conftest import Live, serving
from tests.serve.test_chat import HI, WEATHER, both

OFF = {"chat_template_kwargs": {"enable_thinking": False}}
SCHEMA: Any = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "b"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        "ok": {"type": "boolean"},
    },
    "required": ["kind", "sizes", "ok"],
    "additionalProperties": False,
}
# Bounded, so that no call runs into the token limit.
PLACE: Any = json.loads(json.dumps(WEATHER).replace('{"type": "string"}', '{"enum": ["Rome", "Oslo"]}'))
OTHER: Any = {
    "type": "function",
    "function": {
        "name": "toss",
        "parameters": {"type": "object", "properties": {"up": {"type": "boolean"}}, "required": ["up"]},
    },
}


def json_schema(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}


def test_b41_answers_follow_a_schema(text_server: Live) -> None:
    for seed in range(5):
        whole, _ = both(
            text_server,
            response_format=json_schema(SCHEMA),
            max_tokens=300,
            temperature=1.0,
            seed=seed,
            extra_body=OFF,
        )
        assert whole.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(whole.choices[0].message.content), SCHEMA)


def test_b41_the_schema_begins_after_the_thought(text_server: Live) -> None:
    whole, _ = both(
        text_server,
        response_format=json_schema(SCHEMA),
        max_tokens=400,
        temperature=1.0,
        seed=1,
        extra_body={"thinking_token_budget": 12},
    )
    message = whole.choices[0].message
    jsonschema.validate(json.loads(message.content), SCHEMA)
    assert message.reasoning_content
    assert not message.reasoning_content.startswith("{")


def test_the_vocabulary_is_read_before_anybody_asks(text_folder: Path) -> None:
    loaded = load(text_folder, EngineConfig(max_num_seqs=2, max_model_len=64, cache_bytes=16 << 20))
    front = Front(loaded.engine, loaded.tokenizer)
    with serving(front):
        deadline = time.monotonic() + 20
        while "_vocabulary" not in vars(front.grammars):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_any_object_and_the_responses_form(text_server: Live) -> None:
    live = text_server.openai
    answer = live.chat.completions.create(
        model="test",
        messages=HI,
        response_format={"type": "json_object"},
        max_tokens=60,
        temperature=1.0,
        seed=0,
        extra_body=OFF,
    )
    content = answer.choices[0].message.content or ""
    assert content.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(content), dict)
    form: Any = {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA}}
    response = live.responses.create(
        model="test", input="hi", text=form, max_output_tokens=300, temperature=1.0, extra_body=OFF
    )
    assert response.status == "completed"
    jsonschema.validate(json.loads(response.output_text), SCHEMA)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "toss"}}])
def test_a_required_call_comes(text_server: Live, choice: Any) -> None:
    whole, _ = both(
        text_server,
        tools=[PLACE, OTHER],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=400,
        temperature=1.0,
        seed=2,
        extra_body=OFF,
    )
    (call,) = whole.choices[0].message.tool_calls
    assert whole.choices[0].finish_reason == "tool_calls"
    tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (PLACE, OTHER)}
    if choice != "required":
        assert call.function.name == "toss"
    jsonschema.validate(json.loads(call.function.arguments), tools[call.function.name])


def test_vllms_field_works_for_plain_completions_too(text_server: Live) -> None:
    body: dict[str, Any] = {"prompt": "bada", "temperature": 1.0, "seed": 4, "max_tokens": 40}
    for structure, pattern in (
        ({"regex": "[ab]{3}-[0-9]{2}"}, "[ab]{3}-[0-9]{2}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"json": {"type": "integer"}}, "-?[0-9]+"),
    ):
        choice = text_server.post("/v1/completions", **body, structured_outputs=structure).json()["choices"][0]
        assert re.fullmatch(pattern, choice["text"]), choice
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "/v1/chat/completions",
            {"response_format": json_schema({"type": "object", "properties": {"x": {"type": "strong"}}})},
            "response_format.json_schema.schema.properties.x.type",
        ),
        ("/v1/chat/completions", {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ("/v1/chat/completions", {"response_format": {"type": "xml"}}, "response_format"),
        ("/v1/chat/completions", {"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ("/v1/chat/completions", {"structured_outputs": {"regex": "(["}}, "structured_outputs.regex"),
        ("/v1/chat/completions", {"structured_outputs": {}}, "structured_outputs"),
        (
            "/v1/responses",
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 5}}}},
            "text.format",
        ),
    ],
)
def test_forms_that_cannot_be_are_the_clients_error(
    text_server: Live, path: str, body: dict[str, Any], param: str
) -> None:
    prompt: Any = {"input": "x"} if path.endswith("responses") else {"messages": HI}
    answer = text_server.post(path, **prompt, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param.rpartition(".")[0] or param)
    text_server.settle()
