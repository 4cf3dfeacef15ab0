"""Chat templates: the exact prompt, switches that do something or are refused, and errors that blame the request."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from hemiola.errors import CheckpointError, RequestError
from hemiola.text.chat import ChatTemplate
from hemiola.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "Hi"}
THINK = "<|im_start|>assistant\n<think>\n"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Météo <now>",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["°C", "°F"]}},
                "required": ["city"],
            },
        },
    }
]


def template(source: str, **tokens: str) -> ChatTemplate:
    return ChatTemplate(source, Path("here.jinja"), tokens)


def render(source: str, messages: Any = (USER,), tools: Any = None, **switches: object) -> str:
    return template(source).render(messages, tools, True, switches)


def test_without_system(tokenizer: Tokenizer) -> None:
    assert tokenizer.apply_chat_template([USER]) == (
        "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n" + THINK
    )


def test_with_system_and_without_generation_prompt(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be kind."}, USER]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )


def test_enable_thinking_changes_the_prompt(tokenizer: Tokenizer) -> None:
    on = tokenizer.apply_chat_template([USER], enable_thinking=True)
    off = tokenizer.apply_chat_template([USER], enable_thinking=False)
    assert on == tokenizer.apply_chat_template([USER])
    assert on.endswith(THINK)
    assert off.endswith("<|im_start|>assistant\n<think></think>")


@pytest.mark.parametrize("name", ["low_effort", "Enable_thinking", "messages_", "bos_token", "ns", "raise_exception"])
def test_an_unknown_switch_is_refused_by_name(tokenizer: Tokenizer, name: str) -> None:
    with pytest.raises(RequestError) as caught:
        tokenizer.apply_chat_template([USER], None, True, **{name: True})
    assert caught.value.where == f"chat_template_kwargs.{name}"
    assert "enable_thinking, truncate_history_thinking" in str(caught.value)


def test_tools_are_described_without_escapes(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.apply_chat_template([{"role": "system", "content": "Be kind."}, USER], TOOLS)
    assert prompt == (
        "<|im_start|>system\nBe kind.\n\n# Tools\n\nYou may call these functions:\n\n<tools>\n"
        "<function>\n<name>weather</name>\n<description>Météo <now></description>\n<parameters>\n"
        "<parameter>\n<name>city</name>\n<type>string</type>\n</parameter>\n"
        '<parameter>\n<name>unit</name>\n<type>string</type>\n<enum>["°C", "°F"]</enum>\n</parameter>\n'
        '<required>["city"]</required>\n</parameters>\n</function>\n</tools><|im_end|>\n'
        "<|im_start|>user\nHi<|im_end|>\n" + THINK
    )


def test_calls_and_merged_results(tokenizer: Tokenizer) -> None:
    """Arguments come as OpenAI's JSON strings or as mappings; consecutive results share one turn."""
    calls = [
        {
            "id": "a",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Köln", "days": [1, 2]}'},
        },
        {"id": "b", "type": "function", "function": {"name": "clock", "arguments": {}}},
        {"id": "c", "type": "function", "function": {"name": "clock", "arguments": ""}},
    ]
    messages: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": None, "reasoning_content": "Look it up.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "tool", "tool_call_id": "b", "content": "12:00"},
    ]
    before = copy.deepcopy(messages)
    clock = "<tool_call>\n<function=clock>\n</function>\n</tool_call>\n"
    assert tokenizer.apply_chat_template(messages) == (
        "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nLook it up.\n</think>\n"
        "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n"
        "<parameter=days>\n[1, 2]\n</parameter>\n</function>\n</tool_call>\n" + clock + clock + "<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n<tool_response>\n12:00\n</tool_response>\n<|im_end|>\n"
        + THINK
    )
    assert messages == before


def test_history_loses_its_reasoning_unless_asked(tokenizer: Tokenizer) -> None:
    messages = [USER, {"role": "assistant", "content": "Hello.", "reasoning_content": "Greet."}, USER]
    turn = "<|im_start|>assistant\n{}Hello.<|im_end|>\n"
    assert turn.format("<think></think>") in tokenizer.apply_chat_template(messages)
    kept = tokenizer.apply_chat_template(messages, truncate_history_thinking=False)
    assert turn.format("<think>\nGreet.\n</think>\n") in kept


def test_special_words_become_their_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(tokenizer.apply_chat_template([USER]), add_special_tokens=False)
    assert [i for i in ids if i < 16] == [10, 11, 10, 11, 10, 12]


def test_text_parts_are_joined_and_others_refused(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\na\nb<|im_end|>" in tokenizer.apply_chat_template([{"role": "user", "content": parts}])
    assert "user\n<|im_end|>" in tokenizer.apply_chat_template([{"role": "user", "content": []}])
    with pytest.raises(RequestError) as caught:
        tokenizer.apply_chat_template([USER, {"role": "user", "content": [*parts, {"type": "image_url"}]}])
    assert caught.value.where == "messages[1].content[2]"


def call(arguments: object) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "messages"),
        (["Hi"], "messages[0]"),
        ([USER, {"content": "Hi"}], "messages[1]"),
        ([{"role": 3, "content": "Hi"}], "messages[0]"),
        ([call("{")], "messages[0].tool_calls[0].function.arguments"),
        ([call("[1]")], "messages[0].tool_calls[0].function.arguments"),
        ([call(3)], "messages[0].tool_calls[0].function.arguments"),
        ([{"role": "assistant", "tool_calls": "f"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "messages[0].tool_calls[0]"),
    ],
)
def test_malformed_messages_are_named(tokenizer: Tokenizer, messages: Any, where: str) -> None:
    with pytest.raises(RequestError) as caught:
        tokenizer.apply_chat_template(messages)
    assert caught.value.where == where


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "poet", "content": "Hi"}, "unexpected role poet"),
        ({"role": "user", "content": None}, "TypeError"),
        ({"role": "user"}, "no attribute 'content'"),
        (call(None), "UndefinedError"),
    ],
)
def test_what_the_template_refuses_is_the_requests_error(tokenizer: Tokenizer, message: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=re.escape(reason)):
        tokenizer.apply_chat_template([message])


def test_the_sandbox_holds() -> None:
    for attack in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ messages.__class__.__base__() }}"):
        with pytest.raises(RequestError, match="refuses"):
            render(attack)


def test_the_environment_is_the_one_templates_are_written_for() -> None:
    assert render("{% if true %}\n  {% if true %}\nx\n  {% endif %}\n{% endif %}\ny\n") == "x\ny"
    assert render("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{{ {'b': 'é<&\\'', 'a': [1, none, true]} | tojson }}") == '{"b": "é<&\'", "a": [1, null, true]}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert render("{{ {'b': 1, 'a': 'é'} | tojson(sort_keys=true, separators=(',', ':')) }}") == '{"a":"é","b":1}'
    assert re.fullmatch(r"\d{4}-\d\d", render("{{ strftime_now('%Y-%m') }}"))


def test_special_tokens_are_printed_and_are_no_switches() -> None:
    chat = template("{{ bos_token }}{{ messages[0].content }}{{ mood | default('calm') }}", bos_token="<s>")
    assert chat.switches == {"mood"}
    assert chat.render([USER], None, True, {}) == "<s>Hicalm"
    assert chat.render([USER], None, True, {"mood": "wild"}) == "<s>Hiwild"


def test_tools_are_refused_by_a_template_that_does_not_read_them() -> None:
    with pytest.raises(RequestError, match="takes no tools"):
        render("{{ messages[0].content }}", tools=TOOLS)


def test_a_broken_template_is_the_checkpoints_error() -> None:
    for source in ("{% if %}", "{{ x | nosuchfilter }}", "{% nosuchtag %}"):
        with pytest.raises(CheckpointError) as caught:
            template("ok\n" + source)
        assert caught.value.where == Path("here.jinja")
        assert "line 2" in str(caught.value)
