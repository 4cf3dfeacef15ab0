"""Grammars: what each structure lets through and what it bars, and what clients hear of one that cannot be enforced."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import jsonschema
import pytest

from hemiola.config.sampling import SamplingParams, StructuredSpec
from hemiola.errors import RequestError
from hemiola.structured import Grammars
from hemiola.structured.compiler import MAX_GRAMMARS
from hemiola.text.chat_output import ChatFormat, ChatMessage, ChatParser
from hemiola.text.tokenizer import Tokenizer
from tests.structured.conftest import EOS, VOCAB, allowed, babble, constraint_for, follow
from tests.structured.random_schema import random_object_schema

SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "rows": {"type": "array", "items": {"$ref": "#/$defs/row"}}},
    "required": ["color", "rows"],
    "additionalProperties": False,
    "$defs": {"row": {"type": "array", "items": {"type": "integer"}}},
}


def accepts(grammars: Grammars, tokenizer: Tokenizer, text: str, **structure: Any) -> bool:
    """Whether the text is let through to an end."""
    constraint = constraint_for(grammars, **structure)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return follow(constraint, ids) == len(ids) and set(EOS) <= set(allowed(constraint) or ())


@pytest.mark.parametrize(
    ("structure", "good", "bad"),
    [
        ({"json_object": True}, ['{}', '{"a": [1, {"b": null}]}', '{\n  "a": 1\n}'], ["[]", "1", '{"a"}', "{} x", ""]),
        ({"json_schema": SCHEMA}, ['{"color": "red", "rows": [[1, 2], []]}', '{"color":"blue","rows":[]}'],
         ['{"color": "green", "rows": []}', '{"color": "red"}', '{"color": "red", "rows": [], "x": 1}',
          '{"color": "red", "rows": [["1"]]}']),
        ({"json_schema": {"type": "string", "enum": ["a/b", 'c"d']}}, ['"a/b"', '"c\\"d"'], ["a/b", '"a"']),
        ({"regex": "[a-c]+/\\d{2}"}, ["abc/12", "a/00"], ["abc/1", "/12", "abc/123", "xabc/12"]),
        ({"regex": "a\nb\\/c|d"}, ["a\nb/c", "d"], ["a", "ab/c"]),
        ({"choice": ["yes", "no", 'a "b"\n/c\\', "nothing"]}, ["yes", "no", 'a "b"\n/c\\', "nothing"],
         ["y", "maybe", "noth"]),
    ],
)  # fmt: skip
def test_structures(
    grammars: Grammars, tokenizer: Tokenizer, structure: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not accepts(grammars, tokenizer, text, **structure)] == []
    assert [text for text in bad if accepts(grammars, tokenizer, text, **structure)] == []


def test_after_the_end_only_ends_are_allowed(grammars: Grammars, tokenizer: Tokenizer) -> None:
    constraint = constraint_for(grammars, choice=["yes"])
    assert not constraint.is_finished
    assert not set(EOS) & set(allowed(constraint) or EOS), "no end before"
    follow(constraint, tokenizer.encode("yes"))
    assert constraint.is_finished
    assert allowed(constraint) == list(EOS)
    constraint.accept(11)
    assert allowed(constraint) == list(EOS), "also after one that was ignored"


@pytest.mark.parametrize("seed", range(200))
def test_whatever_is_drawn_is_valid(grammars: Grammars, tokenizer: Tokenizer, seed: int) -> None:
    schema = random_object_schema(seed)
    ids = babble(constraint_for(grammars, json_schema=schema), seed, limit=1500)
    assert max(ids, default=0) < 512, "no id without an entry"
    try:
        value = json.loads(tokenizer.decode(ids, skip_special_tokens=False))
    except ValueError:
        assert len(ids) == 1500, "cut off, or valid"
    else:
        jsonschema.validate(value, schema)


UNIQUE = {"type": "array", "uniqueItems": True}


@pytest.mark.parametrize(
    ("schema", "path", "problem"),
    [
        ({"type": "strin"}, ".type", "no such type; found 'strin'"),
        ({"type": [{}]}, ".type", "no such type"),
        ({"properties": {"a": {"items": 3}}}, ".properties.a.items", "not a schema"),
        ({"properties": 3}, ".properties", "an object of schemas"),
        ({"anyOf": [{}, {"required": "a"}]}, ".anyOf[1].required", "list of names"),
        ({"anyOf": []}, ".anyOf", "list of schemas"),
        ({"$defs": {"a": {"minLength": -1}}}, ".$defs.a.minLength", "whole number"),
        ({"minimum": float("nan")}, ".minimum", "a number"),
        ({"enum": []}, ".enum", "list of values"),
        ({"items": {"$ref": "#/$defs/x"}}, ".items.$ref", "reference to nothing"),
        ({"$ref": "https://example.org/x"}, ".$ref", "reference to nothing"),
        ({"x-guidance": {"lenient": True}}, ".x-guidance", "no keyword"),
        ({"properties": {"a": {"not": {}}}}, ".properties.a", '"not"'),
        ({"properties": {"a": {"items": {"type": "string", "format": "zip"}}}}, ".properties.a.items", "format: zip"),
        ({"properties": {"a": {"$ref": "#/properties/b"}, "b": UNIQUE}}, ".properties.b", "uniqueItems"),
        ({"type": "string", "pattern": "("}, "", "unclosed group"),
        (False, "", "schema is false"),
    ],
)
def test_what_is_wrong_with_a_schema_is_named(grammars: Grammars, schema: Any, path: str, problem: str) -> None:
    with pytest.raises(RequestError, match=re.escape(problem)) as caught:
        grammars.check(SamplingParams(structured=StructuredSpec(json_schema=schema)))
    assert caught.value.where == f"structured.json_schema{path}"
    assert "<state>" not in str(caught.value)


@pytest.mark.parametrize(
    ("structure", "where", "problem"),
    [
        ({"regex": "("}, "structured.regex", "unclosed group"),
        ({"regex": "a/b\\"}, "structured.regex", "cannot be enforced"),
        ({"tools": [{"function": {"name": 3}}]}, "structured.tools[0].function", "not a tool"),
        ({"tools": [{"name": "f", "parameters": {"properties": {"a": {"type": "x"}}}}]},
         "structured.tools[0].function.parameters.properties.a.type", "no such type"),
        ({"tools": [{"name": "f"}, {"name": "g", "parameters": {"properties": {"a": UNIQUE}}}]},
         "structured.tools[1].function.parameters.properties.a", "uniqueItems"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_named(
    grammars: Grammars, structure: dict[str, Any], where: str, problem: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(problem)) as caught:
        grammars.check(SamplingParams(structured=StructuredSpec(**structure)))
    assert caught.value.where == where
    assert "<state>" not in str(caught.value)


@pytest.mark.parametrize("depth", [100, 100_000])
def test_schemas_that_are_nested_too_deeply(grammars: Grammars, depth: int) -> None:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="nested too deeply"):
        grammars.check(SamplingParams(structured=StructuredSpec(json_schema=schema)))


@pytest.mark.parametrize(
    ("structure", "where"),
    [
        ({}, "structured"),
        ({"json_object": True, "regex": "a"}, "structured"),
        ({"json_object": 1}, "structured.json_object"),
        ({"json_schema": "x"}, "structured.json_schema"),
        ({"regex": 3}, "structured.regex"),
        ({"choice": "yes"}, "structured.choice"),
        ({"choice": ["yes", ""]}, "structured.choice[1]"),
        ({"tools": [3]}, "structured.tools[0]"),
    ],
)
def test_a_spec_is_checked_when_it_is_made(structure: dict[str, Any], where: str) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredSpec(**structure)
    assert caught.value.where == where


@pytest.mark.parametrize("field", [{"min_tokens": 1}, {"ignore_eos": True}])
def test_what_a_structure_cannot_keep_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="cannot be kept beside structured output") as caught:
        SamplingParams(structured=StructuredSpec(json_object=True), **field)
    assert [caught.value.where] == list(field)
    with pytest.raises(RequestError, match="not a structure"):
        SamplingParams(structured={"json_object": True})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="thinking_budget: out of range"):
        SamplingParams(thinking_budget=-1)


def test_grammars_are_kept_and_requests_do_not_share_their_place(grammars: Grammars, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("yes")
    one, two = (constraint_for(grammars, choice=["yes", "no"]) for _ in range(2))
    assert follow(one, ids) == follow(two, ids) == len(ids)


def test_no_more_grammars_are_kept_than_is_said(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, VOCAB, EOS)
    for n in range(MAX_GRAMMARS + 5):
        grammars.check(SamplingParams(structured=StructuredSpec(choice=[f"{n}"])))
    assert len(grammars._compiled) == MAX_GRAMMARS


def test_compiling_from_several_threads(tokenizer: Tokenizer) -> None:
    grammars, failures = Grammars(tokenizer, VOCAB, EOS), []

    def compile_some() -> None:
        for n in range(20):
            try:
                grammars.check(SamplingParams(structured=StructuredSpec(regex=f"a{{{n}}}")))
            except RequestError as error:
                failures.append(error)

    threads = [threading.Thread(target=compile_some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_without_the_library_the_request_is_refused(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"needs llguidance, which is not installed.*Install hemiola\[structured\]"):
        Grammars(tokenizer, VOCAB, EOS).check(SamplingParams(structured=StructuredSpec(json_object=True)))


WRITE = {
    "type": "object",
    "properties": {
        "note": {"type": "string"},
        "path": {"type": "string"},
        "kind": {"enum": ["a", "b"]},
        "mode": {"type": "integer"},
        "rows": {"type": "array", "items": {"$ref": "#/$defs/row"}},
    },
    "required": ["path", "mode"],
    "$defs": {"row": {"type": "array", "items": {"type": "boolean"}}},
}
TOOLS = [
    {"type": "function", "function": {"name": "write", "parameters": WRITE}},
    {"type": "function", "function": {"name": "now"}},
]
NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"


def xml(**values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=write>\n{parameters}</function>\n</tool_call>"


@pytest.mark.parametrize(
    "text",
    [
        NOW,
        xml(path="a", mode="420"),
        xml(note="", path="two\nlines", kind="b", mode="-1", rows="[[true, false], []]"),
        xml(path='</parameter> </function> <tool_call"', mode="1"),
        xml(path="a\n</parameter>\n</function>\n", mode="1"),
        xml(path="a", mode="1") + "\n" + NOW + "\n",
    ],
)
def test_calls_are_let_through(grammars: Grammars, tokenizer: Tokenizer, text: str) -> None:
    assert accepts(grammars, tokenizer, text, tools=TOOLS)


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        "",
        xml(path="a"),
        xml(mode="1"),
        xml(path="a", mode="x"),
        xml(path="a", kind="c", mode="1"),
        xml(path="a", mode="1", other="x"),
        xml(path="a", mode="1", rows='[["x"]]'),
        NOW.replace("now", "never"),
        NOW + " and more",
    ],
)
def test_what_is_no_call_is_barred(grammars: Grammars, tokenizer: Tokenizer, text: str) -> None:
    assert not accepts(grammars, tokenizer, text, tools=TOOLS)


def test_one_call_where_several_are_not_wanted(grammars: Grammars, tokenizer: Tokenizer) -> None:
    assert accepts(grammars, tokenizer, NOW + "\n", tools=TOOLS, parallel_tool_calls=False)
    assert not accepts(grammars, tokenizer, NOW + "\n" + NOW, tools=TOOLS, parallel_tool_calls=False)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("form", ["qwen3_coder", "toolcall_json"])
def test_calls_that_are_drawn_are_read_back(
    grammars: Grammars, v2_grammars: Grammars, tokenizer: Tokenizer, form: str, seed: int
) -> None:
    own = grammars if form == "qwen3_coder" else v2_grammars
    ids = babble(constraint_for(own, tools=TOOLS), seed, limit=600)
    parser = ChatParser(ChatFormat(True, form), thinking=False, tools=TOOLS, tokenizer=tokenizer)
    message = ChatMessage()
    message.add(parser.push(tokenizer.decode(ids), ids) + parser.finish(cut=len(ids) == 600))
    assert message.content.strip() == ""
    assert message.tool_calls or parser.cut_off_call == 0
    for i, call in enumerate(message.tool_calls):
        if i != parser.cut_off_call and call.name == "write":
            jsonschema.validate(json.loads(call.arguments), WRITE)


def test_a_model_without_tool_calls_cannot_be_made_to(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "chat_template_source", lambda *_, **__: "{{ messages }}")
    with pytest.raises(RequestError, match="has no form of tool calls"):
        constraint_for(Grammars(tokenizer, VOCAB, EOS), tools=TOOLS)
