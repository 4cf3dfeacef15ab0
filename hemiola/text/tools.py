"""Tool calls in a chat model's text, read while it arrives: the qwen3_coder XML format and v2's JSON format.

XML: <tool_call> <function=NAME> then any number of <parameter=KEY> VALUE </parameter>, then </function> </tool_call>,
with white space between. The format has no escaping, so what ends a value is decided by what follows it:
  - </parameter>, where the next parameter, the call's end, another call or the answer's end follows. A parameter that
    the call has already is no next parameter.
  - </function> without </parameter> before it, where </tool_call>, another call or the answer's end follows.
  - </tool_call> alone, where another call or the answer's end follows.
  - <parameter=KEY> at the beginning of a line, for a KEY of the tool's schema that the call does not have yet.
Any other occurrence belongs to the value. Where a value holds the tags in exactly a form that ends a call, the call
ends there; what follows shows that (ChatParser.doubtful_call).
One newline after <parameter=KEY> and one before the end belong to the format; all other white space is the value's.
A call is complete when its function is closed, or when its last parameter is and </tool_call> or another call follows.
Any other call is cut off by the answer's end.

Values become JSON by the type that the tool's schema gives to their key. Strings go out while they arrive; everything
else when it is complete, because 12 may go on as 123. A value that is not of its type becomes a string, for whoever
carries out the call to refuse; a key without a type is a string.

Source of the formats: vLLM 0.25, parser/qwen3.py, and the chat template of Nemotron Nano v2.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from hemiola.text.marks import Ending, MarkedText, Match, Open, Part, find_word, match_any, match_at

CALL, END_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
JSON_CALLS, END_JSON_CALLS = "<TOOLCALL>", "</TOOLCALL>"

_SPACE, _NAME, _END, _EOS = Part.SPACE, Part.NAME, Part.END, Part.EOS
_FUNCTION_TAG = (FUNCTION, _NAME, ">")
_PARAMETER_TAG = (PARAMETER, _NAME, ">")
_NEXT_CALL = (CALL, _SPACE, *_FUNCTION_TAG)
_MAX_REFERENCES = 16


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What was added to one tool call. id and name come once, with the call's first delta; `arguments` are pieces of
    JSON text that joined are one object, also for a call that was cut off."""

    index: int
    id: str | None
    name: str | None
    arguments: str


class Call(Protocol):
    """The reader of what one opening mark began."""

    is_done: bool
    cut_off: int | None
    """The index of the call that the answer's end cut off."""
    num_calls: int
    """Begun so far."""
    refused: str
    """Text that was consumed and is no call after all."""

    def read(self, tape: MarkedText, ending: Ending) -> Iterator[ToolCallDelta]:
        """Consume what is decided, up to the call's end."""


class ToolFormat(Protocol):
    """openers: the words at which a call may begin. marks: all words that may be marks."""

    openers: ClassVar[tuple[str, ...]]
    marks: ClassVar[tuple[str, ...]]

    def begins(self, tape: MarkedText, position: int, in_thought: bool, ending: Ending) -> Match | Open | None:
        """Whether a call begins at text[position], where an opener stands."""

    def call(self, tape: MarkedText, found: Match, index: int) -> Call:
        """The reader of the call that begins with `found`, which is consumed."""


class Tools:
    """The tools of a request by name. tools: in OpenAI's form, of either endpoint."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        functions = [tool.get("function", tool) for tool in tools]
        self._parameters = {function["name"]: function.get("parameters") or {} for function in functions}

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def keys(self, name: str) -> frozenset[str]:
        """The parameters that the schema of a tool names."""
        properties = self._parameters.get(name, {}).get("properties")
        return frozenset(properties) if isinstance(properties, Mapping) else frozenset()

    def types(self, name: str, key: str) -> frozenset[str]:
        """The JSON types that a parameter may have."""
        root = self._parameters.get(name, {})
        properties = root.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return _types(schema, root, _MAX_REFERENCES) or frozenset({"string"})


class XmlFormat:
    """The qwen3_coder format."""

    openers: ClassVar[tuple[str, ...]] = (CALL, FUNCTION)
    marks: ClassVar[tuple[str, ...]] = (CALL, END_CALL)

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def begins(self, tape: MarkedText, position: int, in_thought: bool, ending: Ending) -> Match | Open | None:
        """<tool_call> with a function after it; or, outside of thoughts, a function of the request's tools alone at
        the beginning of a line."""
        if tape.text.startswith(CALL, position):
            return match_at(tape, position, _NEXT_CALL, ending)
        if in_thought:
            return None
        found = match_at(tape, position, _FUNCTION_TAG, ending)
        return None if isinstance(found, Match) and found.name not in self._tools else found

    def call(self, tape: MarkedText, found: Match, index: int) -> XmlCall:
        is_bare = tape.take(found.end).startswith(FUNCTION)
        return XmlCall(self._tools, found.name, index, is_bare)


class XmlCall:
    """One call. index: its place among the answer's calls. is_bare: it began without <tool_call>."""

    num_calls, refused = 1, ""

    def __init__(self, tools: Tools, name: str, index: int, is_bare: bool) -> None:
        self.is_done = False
        self.cut_off: int | None = None
        self._tools, self._name, self._index = tools, name, index
        self._is_begun = self._is_closed = False
        self._keys: set[str] = set()
        self._value: _Value | None = None
        after_function = [(END_CALL,), _NEXT_CALL, (_EOS,)]
        # What, after </parameter>, shows that it ended the value; and where </parameter> is missing.
        self._after_parameter = [
            (_SPACE, END_CALL),
            (_SPACE, *_NEXT_CALL),
            (_SPACE, _END),
            *((_SPACE, END_FUNCTION, _SPACE, *after) for after in ([()] if is_bare else after_function)),
        ]
        self._after_function = [(_SPACE, *after) for after in after_function]
        self._after_call = [(_SPACE, *_NEXT_CALL), (_SPACE, _EOS)]

    def read(self, tape: MarkedText, ending: Ending) -> Iterator[ToolCallDelta]:
        if not self._is_begun:
            self._is_begun = True
            yield ToolCallDelta(self._index, f"call_{secrets.token_hex(12)}", self._name, "")
        while not self.is_done:
            before = tape.text, self._value, self._is_closed
            for arguments in self._step(tape, ending):
                if arguments:
                    yield ToolCallDelta(self._index, None, None, arguments)
            if (tape.text, self._value, self._is_closed) == before:
                break
        if ending.final and not self.is_done:
            yield from self._cut_off(tape)

    def _step(self, tape: MarkedText, ending: Ending) -> Iterator[str]:
        if self._value is not None:
            yield from self._read_value(self._value, tape, ending)
        elif self._is_closed:
            self._leave(tape, ending)
        else:
            yield from self._between(tape, ending)

    def _between(self, tape: MarkedText, ending: Ending) -> Iterator[str]:
        """Outside of values: the next parameter, or the end. Other text has no meaning here and is dropped."""
        tape.take(len(tape.text) - len(tape.text.lstrip()))
        if isinstance(found := match_at(tape, 0, _PARAMETER_TAG, ending), Match) and found.name not in self._keys:
            tape.take(found.end)
            self._keys.add(found.name)
            self._value = _Value(found.name, self._tools.types(self._name, found.name))
            return
        ends = match_any(tape, 0, [(END_FUNCTION,), (END_CALL,), _NEXT_CALL], ending)
        if isinstance(ends, Match):
            self._is_closed = True
            yield "}" if self._keys else "{}"
            if tape.text.startswith(END_FUNCTION):
                tape.take(len(END_FUNCTION))
        elif tape.text and ends is None and found is not Open.OPEN:
            position, _ = find_word(tape.text, 1, (PARAMETER, END_FUNCTION, END_CALL, CALL), ending.final)
            tape.take(position)

    def _leave(self, tape: MarkedText, ending: Ending) -> None:
        """After the function: consume </tool_call>, which may be missing."""
        found = match_at(tape, 0, (_SPACE, END_CALL), ending)
        if isinstance(found, Match):
            tape.take(found.end)
        self.is_done = found is not Open.OPEN

    def _read_value(self, value: _Value, tape: MarkedText, ending: Ending) -> Iterator[str]:
        if not value.is_begun and tape.text:
            value.is_begun = True
            tape.take(tape.text.startswith("\n"))
        end, length = self._end_of_value(value, tape, ending)
        text = tape.text[:end].removesuffix("\n")
        if value.becomes_text(text):
            value.is_text = True
            yield self._key(value.key) + '"'
        if length is not None:
            tape.take(end + length)
            self._value = None
            yield _escaped(text) + '"' if value.is_text else self._key(value.key) + as_json(text, value.types)
        elif value.is_text and not ending.final:
            value.num_seen += len(text)
            yield _escaped(tape.take(len(text)))
        else:
            value.num_searched = end

    def _end_of_value(self, value: _Value, tape: MarkedText, ending: Ending) -> tuple[int, int | None]:
        """Where the value ends, and how many characters of closing tag it has; None as long as it does not end."""
        words = (END_PARAMETER, END_FUNCTION, END_CALL, PARAMETER)
        start = 0 if value.is_text else value.num_searched
        while True:
            position, word = find_word(tape.text, start, words, ending.final)
            if word is None:
                return position, None
            ends = self._ends_value(value, tape, position, word, ending)
            if isinstance(ends, Match):
                return position, len(END_PARAMETER) if word == END_PARAMETER else 0
            if ends is Open.OPEN:
                return position, None
            start = position + 1

    def _ends_value(
        self, value: _Value, tape: MarkedText, position: int, word: str, ending: Ending
    ) -> Match | Open | None:
        """By the rules at the module's head."""
        after = position + len(word)
        if word == END_PARAMETER:
            found = match_at(tape, after, (_SPACE, *_PARAMETER_TAG), ending)
            if isinstance(found, Match) and found.name in self._keys:
                found = None
            return found or match_any(tape, after, self._after_parameter, ending)
        if word == PARAMETER:
            begins_line = tape.text[position - 1] == "\n" if position else value.num_seen == 0
            found = match_at(tape, position, _PARAMETER_TAG, ending) if begins_line else None
            if isinstance(found, Match) and found.name not in self._tools.keys(self._name) - self._keys:
                return None
            return found
        if not tape.is_mark(position, word):
            return None
        return match_any(tape, after, self._after_function if word == END_FUNCTION else self._after_call, ending)

    def _cut_off(self, tape: MarkedText) -> Iterator[ToolCallDelta]:
        """The answer ends here. A text value has its beginning, any other is left out; the JSON is closed."""
        self.is_done, self.cut_off = True, self._index
        rest = ""
        if self._value is not None and self._value.is_text:
            end, _ = self._end_of_value(self._value, tape, Ending())  # half a closing tag is not the value's
            rest = _escaped(tape.text[:end].removesuffix("\n")) + '"'
        elif self._value is not None:
            self._keys.discard(self._value.key)
        tape.take(len(tape.text))
        yield ToolCallDelta(self._index, None, None, rest + ("}" if self._keys else "{}"))

    def _key(self, key: str) -> str:
        """The JSON before a value; the one after the first follows a comma."""
        return ("{" if len(self._keys) == 1 else ", ") + json.dumps(key, ensure_ascii=False) + ": "


class _Value:
    """A parameter that is being read.

    is_text: it is a string, and goes out while it arrives. num_seen: characters that went out. num_searched: how much
    of the tape is known to hold no end of it.
    """

    def __init__(self, key: str, types: frozenset[str]) -> None:
        self.key, self.types = key, types
        self.is_begun = self.is_text = False
        self.num_seen = self.num_searched = 0

    def becomes_text(self, text: str) -> bool:
        """Whether it is now known to be a string, given its text so far."""
        if self.is_text or not self.is_begun:
            return False
        is_null = "null" in self.types and "null".startswith(text.strip())
        return "string" in self.types and self.types <= {"string", "null"} and not is_null


class JsonFormat:
    """v2's format: <TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>. A call goes out when complete."""

    openers: ClassVar[tuple[str, ...]] = (JSON_CALLS,)
    marks: ClassVar[tuple[str, ...]] = (JSON_CALLS, END_JSON_CALLS)

    def begins(self, tape: MarkedText, position: int, in_thought: bool, ending: Ending) -> Match | Open | None:
        begin = (JSON_CALLS, _SPACE, "[", _SPACE)
        return match_any(tape, position, [(*begin, "{", _SPACE, '"'), (*begin, "]")], ending)

    def call(self, tape: MarkedText, found: Match, index: int) -> JsonCalls:
        return JsonCalls(index, opener=tape.take(tape.text.index("[") + 1))


class JsonCalls:
    """One list of calls. index: of its first call. opener: the text that began it."""

    def __init__(self, index: int, opener: str) -> None:
        self.is_done = False
        self.cut_off: int | None = None
        self.num_calls, self.refused = 0, ""
        self._index, self._opener = index, opener
        self._object = _ObjectEnd()

    def read(self, tape: MarkedText, ending: Ending) -> Iterator[ToolCallDelta]:
        while not self.is_done:
            if not self._object.num_searched:
                tape.take(len(tape.text) - len(tape.text.lstrip(" \t\r\n,")))
            if not tape.text:
                break
            if not tape.text.startswith("{"):
                self._leave(tape, ending)
                break
            end = self._object.find(tape.text)
            if end is None:
                break
            self._object = _ObjectEnd()
            if (call := _read_call(tape.text[:end])) is None:
                self.is_done, self.refused = True, ("" if self.num_calls else self._opener) + tape.take(end)
                break
            tape.take(end)
            name, arguments = call
            index = self._index + self.num_calls
            self.num_calls += 1
            yield ToolCallDelta(index, f"call_{secrets.token_hex(12)}", name, "")
            yield ToolCallDelta(index, None, None, arguments)
        if ending.final and not self.is_done:
            self.is_done = True
            if tape.text.startswith("{"):
                self.cut_off = self._index + self.num_calls
                tape.take(len(tape.text))

    def _leave(self, tape: MarkedText, ending: Ending) -> None:
        """After the last call: consume the end, as far as it is there."""
        found = match_any(tape, 0, [("]", _SPACE, END_JSON_CALLS), (END_JSON_CALLS,)], ending)
        if isinstance(found, Match):
            tape.take(found.end)
        elif found is None and tape.text.startswith("]"):
            tape.take(1)
        self.is_done = found is not Open.OPEN


class _ObjectEnd:
    """Finds where the JSON object that begins a text ends, while the text grows."""

    def __init__(self) -> None:
        self.num_searched = 0
        self._depth = 0
        self._in_string = self._is_escaped = False

    def find(self, text: str) -> int | None:
        for position in range(self.num_searched, len(text)):
            character = text[position]
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return position + 1
        self.num_searched = len(text)
        return None


def _read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments (as JSON text) of a call's object; None when it is none."""
    match _parsed(text):
        case {"name": str(name), **rest}:
            arguments = rest.get("arguments")
            if isinstance(arguments, str):
                arguments = _parsed(arguments)
            elif arguments is None:
                arguments = {}
            return (name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
        case _:
            return None


def as_json(text: str, types: frozenset[str]) -> str:
    """The JSON of a value written as plain text, by the types that it may have; a string when it is of none of them."""
    value = text.strip()
    lenient = "string" not in types  # 007 is the number 7 only where it cannot be text
    if value == "null" and (lenient or "null" in types):
        return value
    if "boolean" in types and value.lower() in {"true", "false"} and (lenient or value.islower()):
        return value.lower()
    if (types & {"integer", "number"}) and (number := _number(value, lenient, "number" in types)):
        return number
    if types & {"object", "array"}:
        parsed = _parsed(value)
        if (isinstance(parsed, dict) and "object" in types) or (isinstance(parsed, list) and "array" in types):
            return value
    return json.dumps(text, ensure_ascii=False)


_NUMBER = re.compile(r"([+-]?)(\d+)(\.\d+)?([eE][+-]?\d+)?")


def _number(text: str, lenient: bool, fractions: bool) -> str | None:
    """A number as JSON writes it, digit by digit, so that none loses any; None when it is no such number."""
    found = _NUMBER.fullmatch(text) if text.isascii() else None
    if found is None:
        return None
    sign, whole, fraction, exponent = found.groups()
    if not fractions and (exponent or (fraction or "").strip(".0")):
        return None
    plain = whole.lstrip("0") or "0"
    number = (sign if sign == "-" else "") + plain + ((fraction or "") + (exponent or "") if fractions else "")
    return number if lenient or number == text else None


def _types(schema: object, root: Mapping[str, Any], depth: int) -> frozenset[str] | None:
    """The types that a schema allows, as far as it says."""
    if not isinstance(schema, Mapping) or not depth:
        return None
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        return _types(_follow(root, reference), root, depth - 1)
    declared = schema.get("type")
    if isinstance(declared, str | list):
        names = [declared] if isinstance(declared, str) else declared
        return frozenset(name for name in names if isinstance(name, str)) or None
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(name), list):
            found = [types for part in parts if (types := _types(part, root, depth - 1))]
            return frozenset().union(*found) if found else None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(_type_of(value) for value in values)
    return frozenset({"object"}) if "properties" in schema else frozenset({"array"}) if "items" in schema else None


def _follow(root: Mapping[str, Any], reference: str) -> object:
    found: object = root
    for step in reference[2:].split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _parsed(text: str) -> object:
    """The value of a JSON text; None when it is not valid JSON (or null)."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
