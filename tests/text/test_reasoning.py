"""Reasoning and content: where an answer begins, what ends a thought, and what clients see of the marks."""

from __future__ import annotations

import pytest

from hemiola.text.reasoning import end_of_thought_ids, thinking_is_open
from hemiola.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import byte_ids
from tests.text.answers import V2, V3, parse, parse_every_way, xml_call


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "content"),
    [
        ("42", False, "", "42"),
        ("<think></think>42", False, "", "42"),
        ("x</think>42", True, "x", "42"),
        ("<think>x</think>42", True, "x", "42"),
        ("x", True, "x", ""),
        ("", True, "", ""),
        ("", False, "", ""),
        ("</think>42", True, "", "42"),
        ("</think>\n\n42", False, "", "42"),
        ("one<think>two</think>3", True, "onetwo", "3"),
        ("x</think></think>42</think>", True, "x", "42"),
        ("x</think>4</think>2", True, "x", "42"),
        ("x \n\n</think>\n\n42\n", True, "x", "42\n"),
        ("<think>\n x\n</think>\n  42", True, "x", "  42"),
        ("a\n\n b", True, "a\n\n b", ""),
        ("\n42", False, "", "\n42"),
        ("<think>x</think>42", False, "x", "42"),
        ("x</think><think>y</think>42", True, "x\ny", "42"),
        ("The <think> mark opens, </think> closes.", False, "", "The <think> mark opens, </think> closes."),
        ("a < b, <thin, </thi", True, "a < b, <thin, </thi", ""),
        ("x</think>a < b, <thin, </thi", True, "x", "a < b, <thin, </thi"),
    ],
)
def test_b36_reasoning_and_content(text: str, thinking: bool, reasoning: str, content: str) -> None:
    assert parse_every_way(text, thinking=thinking).shown == (reasoning, content, [])
    assert parse_every_way(text, thinking=thinking, format=V2).shown == (reasoning, content, [])


def test_b37_a_call_ends_a_thought_and_nothing_is_lost() -> None:
    parsed = parse_every_way("plan \n" + xml_call("write", path="a") + "</think>\ndone")
    assert parsed.shown == ("plan", "done", [("write", {"path": "a"})])


@pytest.mark.parametrize("text", ["say <tool_call> and on", "say <tool_call>\n", "say <function=write>\n<parameter="])
def test_a_mention_of_a_call_does_not_end_a_thought(text: str) -> None:
    assert parse_every_way(text).shown == (text.strip(), "", [])


def test_without_tools_a_call_is_prose() -> None:
    text = xml_call("write", path="a")
    assert parse_every_way("x" + text, tools=()).shown == (("x" + text).strip(), "", [])
    assert parse_every_way("x</think>" + text, tools=()).shown == ("x", text, [])


@pytest.mark.parametrize("switch", [{"thinking": False}, {"force_nonempty_content": True}])
def test_the_client_always_gets_text_where_that_is_asked_for(switch: dict[str, bool]) -> None:
    assert parse_every_way("<think>x", **switch).shown == ("", "x", [])
    assert parse_every_way("<think>x</think>\n ", **switch).shown == ("", "x", [])
    assert parse_every_way("<think>x</think>y", **switch).shown == ("x", "y", [])
    call = parse_every_way("<think>x</think>" + xml_call("now"), **switch)
    assert call.shown == ("x", "", [("now", {})]), "a call is an answer"


def test_blank_content_stays_where_nothing_is_swapped() -> None:
    assert parse(["  "], thinking=False).shown == ("", "  ", [])
    assert parse(["x</think>"]).shown == ("x", "", [])


def test_reasoning_streams() -> None:
    assert [delta.reasoning for delta in parse(["ab", "c d", " e</think>"]).deltas] == ["ab", "c d", " e"]


def test_a_model_without_thoughts_has_no_marks() -> None:
    plain = type(V3)(reasoning=False, tools=None)
    assert parse_every_way("a<think>b</think>c", format=plain, thinking=True).shown == ("", "a<think>b</think>c", [])


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think></think>", False),
        ("<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n<think></think>", False),
        ("<|im_start|>user\nwhat is </think>?<|im_end|>\n<|im_start|>assistant\n<think>\n", True),
        ("no template", False),
    ],
)
def test_the_prompt_says_whether_the_answer_begins_in_a_thought(prompt: str, is_open: bool) -> None:
    assert thinking_is_open(prompt) is is_open


@pytest.mark.parametrize("switch", [True, False])
def test_the_template_switch_reaches_the_parser(tokenizer: Tokenizer, switch: bool) -> None:
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], enable_thinking=switch)
    assert thinking_is_open(prompt) is switch
    assert parse(["x"], thinking=thinking_is_open(prompt)).shown == (("x", "", []) if switch else ("", "x", []))


def test_the_end_of_a_thought_is_what_the_template_writes(tokenizer: Tokenizer) -> None:
    assert end_of_thought_ids(tokenizer) == [*byte_ids(b"\n"), 13, *byte_ids(b"\n")]
