"""Tool calls: both formats, the types of arguments, what ends a value, and calls that are cut off."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hemiola.text.tools import as_json
from tests.text.answers import TOOLS, V2, parse, parse_every_way, tool, xml_call


def arguments_of(text: str, **options: Any) -> dict[str, Any]:
    """The arguments of the one call in an answer that is otherwise empty."""
    parsed = parse_every_way(text, thinking=False, **options)
    assert (parsed.reasoning, parsed.content, parsed.cut_off, parsed.doubtful) == ("", "", None, None)
    ((_, arguments),) = parsed.calls
    return arguments  # type: ignore[no-any-return]


def argument(value: str, schema: object) -> Any:
    return arguments_of(xml_call("f", x=value), tools=[tool("f", x=schema)])["x"]


TEXTS = [
    'he said "hi"',
    "C:\\tmp\\n",
    "two\nlines",
    '{"a":["b\\"c"]}',
    "007",
    "true",
    "null",
    "1e3",
    "",
    "  spaces ",
    "\n",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("schema", [{"type": "string"}, {"enum": ["a", "b"]}, {}, None, True])
def test_a_string_stays_what_it_is(text: str, schema: object) -> None:
    assert argument(text, schema) == text


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("1e3", {"type": "number"}, 1000.0),
        ("007", {"type": "integer"}, 7),
        ("007", {"type": ["string", "integer"]}, "007"),
        ("12", {"type": ["string", "integer"]}, 12),
        (" -3 ", {"type": "integer"}, -3),
        ("3.0", {"type": "integer"}, 3),
        ("3.5", {"type": "integer"}, "3.5"),
        ("123456789012345678901234567890", {"type": "integer"}, 123456789012345678901234567890),
        ("NaN", {"type": "number"}, "NaN"),
        ("twelve", {"type": "integer"}, "twelve"),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("null", {"type": "integer"}, None),
        ("null", {"type": ["string", "null"]}, None),
        ("nullable", {"type": ["string", "null"]}, "nullable"),
        ("null\nvoid", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "null\nvoid"),
        ("", {"type": ["string", "null"]}, ""),
        ('{"a":["b\\"c"]}', {"type": "object"}, {"a": ['b"c']}),
        ("[1,\n 2]", {"items": {"type": "integer"}}, [1, 2]),
        ("{'a': 1}", {"type": "object"}, "{'a': 1}"),
        ("[1]", {"type": "object"}, "[1]"),
        ("[NaN]", {"type": "array"}, "[NaN]"),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"const": 2}, 2),
        ("2", {"allOf": [{"description": "x"}, {"type": "integer"}]}, 2),
        ("2", {"$ref": "#/$defs/n"}, 2),
        ("2", {"$ref": "#/$defs/loop"}, "2"),
        ("2", {"type": 3}, "2"),
    ],
)
def test_b39_types_come_from_the_schema(text: str, schema: dict[str, Any], value: object) -> None:
    definitions = tool("f", x=schema)
    definitions["function"]["parameters"]["$defs"] = {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}
    found = parse([xml_call("f", x=text)], thinking=False, tools=[definitions]).calls[0][1]["x"]
    assert found == value
    assert type(found) is type(value)


@given(st.text(), st.sets(st.sampled_from("string integer number boolean null object array".split()), min_size=1))
def test_any_text_of_any_type_is_valid_json(text: str, types: set[str]) -> None:
    value = json.loads(as_json(text, frozenset(types)))
    assert not isinstance(value, str) or value == text


def test_several_calls_with_content_before_and_after() -> None:
    text = "I write.\n\n" + xml_call("write", path="a", content="b") + xml_call("now") + "Done."
    parsed = parse_every_way(text, thinking=False)
    assert parsed.shown == ("", "I write.\nDone.", [("write", {"path": "a", "content": "b"}), ("now", {})])


def test_both_forms_of_tools_and_unknown_names() -> None:
    flat = [TOOLS[0]["function"] | {"type": "function"}]
    assert arguments_of(xml_call("write", mode="3"), tools=flat) == {"mode": 3}
    assert arguments_of(xml_call("write", mode="3", other="4")) == {"mode": 3, "other": "4"}
    assert parse([xml_call("unknown", x="3")], thinking=False).calls == [("unknown", {"x": "3"})]


BEGIN, FUNCTION_END, CALL_END = "<tool_call>\n<function=write>\n", "</function>\n", "</tool_call>"
PATH, CONTENT = "<parameter=path>\na\n", "<parameter=content>\nb\n"
CLOSE = "</parameter>\n"


@pytest.mark.parametrize(
    "text",
    [
        BEGIN + PATH + CLOSE + CONTENT + FUNCTION_END + CALL_END,  # the last parameter is not closed
        BEGIN + PATH + CONTENT + CLOSE + FUNCTION_END + CALL_END,  # the first is not
        BEGIN + PATH + CONTENT + CALL_END,  # nothing is but the call
        BEGIN + PATH + CLOSE + CONTENT + CLOSE + CALL_END,  # the function is not
        BEGIN + PATH + CLOSE + CONTENT + CLOSE + FUNCTION_END,  # the call is not
        BEGIN + PATH + CLOSE + CONTENT + FUNCTION_END,  # only the function is
        BEGIN.removeprefix("<tool_call>\n") + PATH + CLOSE + CONTENT + CLOSE + FUNCTION_END + CALL_END,
        BEGIN.removeprefix("<tool_call>\n") + PATH + CLOSE + CONTENT + CLOSE + FUNCTION_END,
        (BEGIN + PATH + CLOSE + CONTENT + CLOSE + FUNCTION_END + CALL_END).replace("\n", ""),
        BEGIN + "so:\n" + PATH + CLOSE + CONTENT + CLOSE + FUNCTION_END + CALL_END,
    ],
)
def test_b38_missing_closing_tags(text: str) -> None:
    assert arguments_of(text) == {"path": "a", "content": "b"}
    two = parse_every_way(text + "\n" + xml_call("now"), thinking=False)
    assert two.calls == [("write", {"path": "a", "content": "b"}), ("now", {})]


def test_a_bare_call_ends_at_its_function() -> None:
    text = "Now:\n<function=now>\n</function>\nDone."
    assert parse_every_way(text, thinking=False).shown == ("", "Now:\nDone.", [("now", {})])


@pytest.mark.parametrize(
    "text",
    [
        "Call it as <function=now> in a line.",
        "<function=unknown>\n</function>",
        "The <tool_call> mark begins a call.",
        "<tool_call>\nnow\n",
        "`<parameter=path>` and </parameter>, </function>",
        "<function=",
        "<tool_call>\n<function=no",
    ],
)
def test_words_of_calls_in_prose_are_prose(text: str) -> None:
    assert parse_every_way(text, thinking=False).shown == ("", text, [])


@pytest.mark.parametrize(
    "value",
    [
        "a</parameter>b",
        "a\n</parameter>\nb",
        "a</function>b",
        "a\n</function>\nb",
        "a</parameter>\n</function>\nb",
        "a<tool_call>b</tool_call>c",
        "<tool_call>\n<function=write>\n<parameter=content>\nx",
        "a\n<parameter=unknown>\nb",
        "a <parameter=mode> b",
        "<parameter=content>\nx\n</parameter>\n<parameter=content>\n",
        "</",
        "</parameter",
        "<<<",
    ],
)
def test_b40_tags_inside_of_a_value_are_its_own(value: str) -> None:
    assert arguments_of(xml_call("write", path="p", content=value)) == {"path": "p", "content": value}


def test_b40_a_value_that_ends_like_a_call_is_flagged_and_its_rest_is_not_lost() -> None:
    value = "before\n</parameter>\n</function>\n</tool_call>\nafter"
    parsed = parse_every_way(xml_call("write", content=value), thinking=False)
    assert parsed.calls == [("write", {"content": "before"})]
    assert parsed.content.startswith("after")
    assert parsed.doubtful == 0


FULL = "Ok.\n" + xml_call("write", path="a/b", content='x\n</parameter> "y"', mode="420") + xml_call("now")


@pytest.mark.parametrize("length", range(len(FULL) + 1))
def test_b38_a_call_that_is_cut_off_is_never_given_as_complete(length: int) -> None:
    parsed = parse([FULL[:length]], thinking=False, cut=True)
    whole = parse([FULL], thinking=False).calls
    complete = [call for i, call in enumerate(parsed.calls) if i != parsed.cut_off]
    assert complete == whole[: len(complete)]
    is_begun = "<function=write>" in FULL[:length]
    assert not is_begun or parsed.cut_off is not None or complete, "said, or complete"
    assert parsed.doubtful is None
    if parsed.cut_off == 0:
        assert whole[0][1]["content"].startswith(parsed.calls[0][1].get("content", "")), "no tags in the value"


def test_a_number_that_is_cut_off_is_left_out() -> None:
    parsed = parse(["<tool_call>\n<function=write>\n<parameter=path>\nab</parameter>\n<parameter=mode>\n42"], cut=True)
    assert (parsed.calls, parsed.cut_off) == ([("write", {"path": "ab"})], 0)


def test_the_models_own_end_counts_where_a_limit_does_not() -> None:
    text = BEGIN + PATH + FUNCTION_END
    assert parse([text], cut=False).cut_off is None
    assert parse([text], cut=True).cut_off == 0
    assert parse([BEGIN + PATH + CLOSE], cut=False).cut_off == 0, "without the function's end there may be more"


def test_strings_stream_and_numbers_do_not() -> None:
    pieces = [BEGIN, "<parameter=content>\nab", 'c"', "d", "\n</parameter>\n<parameter=mode>\n1", "2", "\n</parameter>"]
    deltas = [delta.tool_call for delta in parse(pieces, thinking=False).deltas if delta.tool_call]
    assert (deltas[0].name, deltas[0].arguments) == ("write", "")
    assert deltas[0].id is not None
    assert deltas[0].id.startswith("call_")
    assert [delta.arguments for delta in deltas[1:]] == ['{"content": "', "ab", 'c\\"', "d", '"', ', "mode": 12', "}"]
    assert all(delta.id is None and delta.name is None for delta in deltas[1:])


def test_an_optional_string_streams_once_it_is_known_not_to_be_null() -> None:
    pieces = ["<tool_call>\n<function=ask>\n<parameter=question>\nnul", "l", "ify", " it"]
    deltas = [delta.tool_call.arguments for delta in parse(pieces, thinking=False).deltas if delta.tool_call]
    assert "".join(deltas[:3]) == '{"question": "nullify'
    assert deltas[3] == " it"


NAMES = st.sampled_from(["write", "ask", "now"])
VALUES = st.text(st.sampled_from('ab "\\\n<>/{}é😀'), max_size=12)


@given(st.lists(st.tuples(NAMES, st.dictionaries(st.sampled_from(["path", "content", "other"]), VALUES))), st.data())
def test_what_the_template_writes_is_read_back(calls: list[tuple[str, dict[str, str]]], data: st.DataObject) -> None:
    text = "".join(xml_call(name, **values) for name, values in calls)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    parsed = parse(pieces, thinking=False)
    assert (parsed.calls, parsed.content, parsed.cut_off) == (calls, "", None)


WORDS = (
    "<think> </think> <tool_call> </tool_call> <function=write> <function=no </function> <parameter=path> "
    '<parameter=mode> <parameter=zz> </parameter> </param 12 null a" b < \\'
)
FRAGMENTS = st.sampled_from([*WORDS.split(), "\n", " ", "\n\n"])


@given(st.lists(FRAGMENTS, max_size=25), st.booleans(), st.booleans(), st.data())
def test_any_text_parses_alike_however_it_is_cut(
    fragments: list[str], thinking: bool, cut: bool, data: st.DataObject
) -> None:
    text = "".join(fragments)
    whole = parse([text], thinking=thinking, cut=cut)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(pieces, thinking=thinking, cut=cut).all == whole.all
    assert parse(list(text), thinking=thinking, cut=cut).all == whole.all


def json_calls(*calls: object) -> str:
    return f"<TOOLCALL>{json.dumps(list(calls))}</TOOLCALL>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (json_calls({"name": "now", "arguments": {}}), "", [("now", {})]),
        (json_calls({"name": "now"}), "", [("now", {})]),
        (json_calls(), "", []),
        ("Ok.\n" + json_calls({"name": "a", "arguments": {"x": '</TOOLCALL>]}"'}}), "Ok.",
         [("a", {"x": '</TOOLCALL>]}"'})]),
        (json_calls({"name": "a", "arguments": {"x": [1]}}, {"name": "b", "arguments": '{"y": {}}'}) + "\nx", "x",
         [("a", {"x": [1]}), ("b", {"y": {}})]),
        ('<TOOLCALL>[{"name": "a"}', "", [("a", {})]),
        ('<TOOLCALL>[{"name": "a"}]', "", [("a", {})]),
        ('<TOOLCALL>[{"name": "a"}, ]</TOOLCALL>', "", [("a", {})]),
        ('<TOOLCALL>[{"name": 1}]</TOOLCALL>', '<TOOLCALL>[{"name": 1}]</TOOLCALL>', []),
        ('<TOOLCALL>[{"name": "a" "b"}]</TOOLCALL>', '<TOOLCALL>[{"name": "a" "b"}]</TOOLCALL>', []),
        ("The <TOOLCALL>[...]</TOOLCALL> form", "The <TOOLCALL>[...]</TOOLCALL> form", []),
    ],
)  # fmt: skip
def test_the_json_format(text: str, content: str, calls: list[object]) -> None:
    parsed = parse_every_way("x</think>" + text, format=V2)
    assert (*parsed.shown, parsed.cut_off) == ("x", content, calls, None)


def test_a_json_call_ends_a_thought() -> None:
    assert parse_every_way("plan " + json_calls({"name": "a"}), format=V2).shown == ("plan", "", [("a", {})])


def test_a_json_call_that_is_cut_off_is_said_and_not_given() -> None:
    text = json_calls({"name": "a"}, {"name": "b", "arguments": {"x": "yz"}})
    for length in range(text.index('{"name": "b"') + 1, text.index("}}]") + 2):
        parsed = parse([text[:length]], format=V2, cut=True, thinking=False)
        assert (parsed.calls, parsed.cut_off) == ([("a", {})], 1)
