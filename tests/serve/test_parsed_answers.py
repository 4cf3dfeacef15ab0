"""Public bug reports about parsers, on a live server whose model speaks by script: B36 to B42, whole and streamed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.serve.conftest import Live
from tests.serve.test_chat import CALL, HI, WEATHER, Message, both
from tests.support.tiny_tokenizer import byte_ids
from tests.text.answers import TOOLS, xml_call


def described(function: dict[str, Any]) -> dict[str, Any]:
    """With all that the test template reads."""
    parameters = function.get("parameters", {"type": "object", "properties": {}})
    return {**function, "description": "does it", "parameters": {**parameters, "required": []}}


WRITE: Any = {"type": "function", "function": described(TOOLS[0]["function"])}


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def texts(whole: Any) -> tuple[str, str]:
    message = whole.choices[0].message
    return getattr(message, "reasoning_content", ""), message.content or ""


def test_b36_reasoning_only_where_there_was_a_thought(scripted: Callable[..., Live]) -> None:
    off = {"42": ("", "42"), "<think></think>42": ("", "42")}
    on = {"x</think>42": ("x", "42"), "<think>x</think>42": ("x", "42"), "x": ("x", "")}
    for thinking, expected in ((False, off), (True, on)):
        live = scripted({f"say {text}": text for text in expected}, thinking=thinking)
        for text, fields in expected.items():
            extra = {"chat_template_kwargs": {"enable_thinking": thinking}}
            assert texts(both(live, messages=user(f"say {text}"), extra_body=extra)[0]) == fields


def test_b36_content_is_there_where_it_is_asked_for(scripted: Callable[..., Live]) -> None:
    live = scripted({"hi": "x"})
    assert texts(both(live)[0]) == ("x", "")
    forced = {"chat_template_kwargs": {"force_nonempty_content": True}}
    assert texts(both(live, extra_body=forced)[0]) == ("", "x")
    forced["chat_template_kwargs"]["force_nonempty_content"] = "yes"  # type: ignore[assignment]  # that is the test
    answer = live.post("/v1/chat/completions", messages=HI, **forced)
    assert answer.json()["error"]["param"] == "chat_template_kwargs.force_nonempty_content"


def test_b37_a_call_inside_of_a_thought_is_seen(scripted: Callable[..., Live]) -> None:
    live = scripted({"hi": f"plan {xml_call('write', path='a')}"}, tools=[WRITE], max_model_len=4096)
    whole, _ = both(live, tools=[WRITE], max_tokens=300)
    assert texts(whole) == ("plan", "")
    assert whole.choices[0].finish_reason == "tool_calls"
    assert json.loads(whole.choices[0].message.tool_calls[0].function.arguments) == {"path": "a"}


def test_b38_missing_closing_tags(scripted: Callable[..., Live]) -> None:
    """Without </parameter> or </function> the call is whole; without both, too, where the call itself is closed."""
    call = xml_call("write", path="a", content="b")
    last, function = "\n</parameter>\n</function>", "</function>\n"
    ways = [call.replace(last, "\n</function>"), call.replace(function, ""), call.replace(last, "")]
    live = scripted({f"way {i}": f"</think>{text}" for i, text in enumerate(ways)}, tools=[WRITE], max_model_len=4096)
    for i in range(len(ways)):
        whole, _ = both(live, messages=user(f"way {i}"), tools=[WRITE], max_tokens=300)
        (found,) = whole.choices[0].message.tool_calls
        assert json.loads(found.function.arguments) == {"path": "a", "content": "b"}


def test_b38_a_call_that_the_limit_cuts_is_never_complete(scripted: Callable[..., Live]) -> None:
    inner = CALL.removeprefix("<tool_call>").removesuffix("</tool_call>")
    script = [13, 14, *byte_ids(inner.encode()), 15, 11]
    live = scripted({"hi": script}, tools=[WEATHER], max_model_len=4096)
    create: Any = live.openai.chat.completions.create
    for count in range(30, inner.index("</function>"), 13):
        options = {"model": "test", "messages": HI, "tools": [WEATHER], "max_tokens": count}
        choice = create(**options).choices[0]
        assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
        assert Message(create(**options, stream=True)).finish_reason == "length"


VALUES = {
    "path": ['he said "hi"', "C:\\tmp\\n", "two\nlines", '{"a":["b\\"c"]}', "007", "true", "null", "", "  indented"],
    "mode": ["7", "-1"],
    "other": ["1e3"],
}
TYPES = {"path": {"type": "string"}, "mode": {"type": "integer"}, "other": {"type": "number"}}
TYPED: Any = {"type": "function", "function": described({"name": "f", "parameters": {"properties": TYPES}})}


def test_b39_values_of_all_kinds(scripted: Callable[..., Live]) -> None:
    cases = [(key, value) for key, values in VALUES.items() for value in values]
    answers = {f"case {i}": f"</think>{xml_call('f', **{key: value})}" for i, (key, value) in enumerate(cases)}
    live = scripted(answers, tools=[TYPED], max_model_len=4096)
    for i, (key, value) in enumerate(cases):
        whole, _ = both(live, messages=user(f"case {i}"), tools=[TYPED], max_tokens=300)
        (call,) = whole.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {key: value if key == "path" else json.loads(value)}


def test_b40_tags_inside_of_a_value(scripted: Callable[..., Live]) -> None:
    values = ["a</parameter>b", "a\n</function>\nb", "a<tool_call>b", "a\n</parameter>\n</function>\nb"]
    answers = {f"value {i}": f"</think>{xml_call('write', content=value)}" for i, value in enumerate(values)}
    live = scripted(answers, tools=[WRITE], max_model_len=4096)
    for i, value in enumerate(values):
        whole, _ = both(live, messages=user(f"value {i}"), tools=[WRITE], max_tokens=300)
        (call,) = whole.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"content": value}
        assert not hasattr(whole.choices[0], "doubtful_tool_call")


def test_b40_a_value_that_ends_a_call_is_flagged(scripted: Callable[..., Live]) -> None:
    value = "before\n</parameter>\n</function>\n</tool_call>\nafter"
    live = scripted({"hi": f"</think>{xml_call('write', content=value)}"}, tools=[WRITE], max_model_len=4096)
    options: dict[str, Any] = {"tools": [WRITE], "max_tokens": 300}
    whole, _ = both(live, **options)
    assert whole.choices[0].doubtful_tool_call == 0
    assert whole.choices[0].message.content.startswith("after")
    chunks = list(live.openai.chat.completions.create(model="test", messages=HI, stream=True, **options))
    assert chunks[-1].choices[0].doubtful_tool_call == 0  # type: ignore[attr-defined]  # a field beyond OpenAI's
    tool: Any = {"type": "function", **WRITE["function"]}
    create: Any = live.openai.responses.create
    whole_response = create(model="test", input="hi", tools=[tool])
    last = list(create(model="test", input="hi", tools=[tool], stream=True))[-1].response
    for response in (whole_response, last):
        assert [item.status for item in response.output if item.type == "function_call"] == ["incomplete"]


@pytest.mark.parametrize("thinking", [True, False])
def test_b42_content_holds_no_think_marks(scripted: Callable[..., Live], thinking: bool) -> None:
    outputs = [
        "".join(parts)
        for parts in itertools.product(
            ["", "<think>", "thought"], ["", "</think>", "</think>\n\n", "</think></think>", "<think></think>"], ["42"]
        )
        if thinking or parts[:2] != ("thought", "<think></think>")  # prose that quotes both
    ]
    live = scripted({f"output {i}": text for i, text in enumerate(outputs)}, thinking=thinking)
    for i in range(len(outputs)):
        extra = {"chat_template_kwargs": {"enable_thinking": thinking}}
        assert "think>" not in texts(both(live, messages=user(f"output {i}"), extra_body=extra)[0])[1]


def test_pieces_of_one_byte_give_the_same_answer(scripted: Callable[..., Live]) -> None:
    """Every token is one byte of the answer, but for the marks; characters of several bytes everywhere."""
    value = 'é\n</parameter> "한" 😀'
    call = [*byte_ids(xml_call("write", path="ü", content=value).removeprefix("<tool_call>").encode())]
    end = byte_ids(b"</tool_call>\n")
    script = [*byte_ids("Grüße 😀".encode()), 13, *byte_ids("Ä: ".encode()), 14, *call[: -len(end)], 15, 11]
    live = scripted({"hi": script}, tools=[WRITE], max_model_len=4096)
    whole, _ = both(live, tools=[WRITE], max_tokens=300)
    assert texts(whole) == ("Grüße 😀", "Ä:")
    (found,) = whole.choices[0].message.tool_calls
    assert json.loads(found.function.arguments) == {"path": "ü", "content": value}
