"""Grammars of llguidance for what requests ask for: JSON, patterns, choices, and tool calls in the model's own format.

A call in the XML format has its parameters in the schema's order. Strings are free text: where a value holds a closing
tag the grammar lets the model go on, and ends the value only where the parser does (hemiola.text.tools); a string's own
keywords (pattern, lengths) are not enforced there, an enum of strings is. All other values are JSON of their schema, on
one line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hemiola.config.sampling import StructuredSpec
from hemiola.errors import RequestError
from hemiola.structured.schema import check_schema, rerooted
from hemiola.text.tools import (
    CALL,
    END_CALL,
    END_FUNCTION,
    END_JSON_CALLS,
    END_PARAMETER,
    FUNCTION,
    JSON_CALLS,
    PARAMETER,
    Tools,
)

# Values of tool calls on one line, with Python's separators, as the family's templates write them.
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_TEXT = r"(?s:.*)"


def grammar_of(spec: StructuredSpec, tool_format: str | None, mark_ids: Mapping[str, int]) -> str:
    """The grammar as llguidance's JSON.

    tool_format: the model's, see ChatFormat. mark_ids: the marks that are tokens of their own.
    Raises: RequestError that names the field, or the path in a schema.
    """
    if spec.json_object:
        return _json_grammar({"type": "object"})
    if spec.json_schema is not None:
        check_schema(spec.json_schema, "structured.json_schema")
        return _json_grammar(spec.json_schema)
    if spec.regex is not None:
        return _lark_grammar(f"start: /{_in_lark(spec.regex)}/")
    if spec.choice:
        return _lark_grammar("start: " + " | ".join(_quoted(text) for text in spec.choice))
    return _tool_grammar(spec, tool_format, mark_ids)


def _json_grammar(schema: object) -> str:
    return json.dumps({"grammars": [{"json_schema": schema}]})


def _lark_grammar(lark: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def _tool_grammar(spec: StructuredSpec, tool_format: str | None, mark_ids: Mapping[str, int]) -> str:
    functions = []
    for i, tool in enumerate(spec.tools):
        where = f"structured.tools[{i}].function"
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError("not a tool", expected="a function with a name", where=where)
        parameters = function.get("parameters") or {}
        check_schema(parameters, f"{where}.parameters")
        if not isinstance(parameters, Mapping):
            raise RequestError("not the parameters of a tool", expected="an object", where=f"{where}.parameters")
        functions.append((function["name"], parameters))
    if tool_format == "qwen3_coder":
        return _lark_grammar(_XmlGrammar(mark_ids).calls(functions, Tools(spec.tools), spec.parallel_tool_calls))
    if tool_format == "toolcall_json":
        return _lark_grammar(_json_calls(functions, spec.parallel_tool_calls, mark_ids))
    raise RequestError("the chat template of this model has no form of tool calls", where="structured.tools")


def _json_calls(functions: Sequence[tuple[str, Mapping[str, Any]]], parallel: bool, mark_ids: Mapping[str, int]) -> str:
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "arguments": rerooted({"type": "object", **parameters}, f"/items/anyOf/{i}/properties/arguments"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i, (name, parameters) in enumerate(functions)
    ]
    limit = {} if parallel else {"maxItems": 1}
    schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **limit, "x-guidance": _ONE_LINE}
    begin, end = _mark(JSON_CALLS, mark_ids), _mark(END_JSON_CALLS, mark_ids)
    return f"start: {begin} calls {end}\ncalls: %json {json.dumps(schema)}"


class _XmlGrammar:
    """Rules of the XML format, by what may follow: after a parameter's opening tag comes its value, together with the
    next tag, because a string ends only where a next tag stands."""

    def __init__(self, mark_ids: Mapping[str, int]) -> None:
        self._begin, self._end = _mark(CALL, mark_ids), _mark(END_CALL, mark_ids)
        self._rules: list[str] = []

    def calls(self, functions: Sequence[tuple[str, Mapping[str, Any]]], tools: Tools, parallel: bool) -> str:
        names = [self._call(i, name, parameters, tools) for i, (name, parameters) in enumerate(functions)]
        more = r' ("\n" call)*' if parallel else ""
        return "\n".join([rf'start: call{more} "\n"?', f"call: {' | '.join(names)}", *self._rules])

    def _call(self, i: int, name: str, parameters: Mapping[str, Any], tools: Tools) -> str:
        properties = parameters.get("properties") or {}
        keys = list(properties)
        required = [key in parameters.get("required", ()) for key in keys]
        first = self._alternatives(i, -1, keys, required, lambda tag, after: f"{_quoted(tag)} {after}".strip())
        head = _quoted(f"\n{FUNCTION}{name}>\n")
        self._rules.append(f"call_{i}: {self._begin} {head} first_{i} {self._end}")
        self._rules.append(f"first_{i}: {first}")
        for k, key in enumerate(keys):
            self._rules += self._value(i, k, key, keys, required, parameters, tools.types(name, key))
        return f"call_{i}"

    def _value(
        self,
        i: int,
        k: int,
        key: str,
        keys: Sequence[str],
        required: Sequence[bool],
        parameters: Mapping[str, Any],
        types: frozenset[str],
    ) -> list[str]:
        schema = parameters["properties"][key]
        values: list[Any] = (schema.get("enum") if isinstance(schema, Mapping) else None) or []
        rules: list[str] = []

        def after_text(tag: str, after: str) -> str:
            name = f"text_{i}_{k}_{len(rules)}"
            end = _in_lark(re.escape(f"\n{END_PARAMETER}\n{tag}"))
            rules.append(f"{name}[lazy]: /{_ANY_TEXT}{end}/")
            return f"{name} {after}".strip()

        def after_value(tag: str, after: str) -> str:
            end = _quoted(f"\n{END_PARAMETER}\n{tag}")
            return f"value_{i}_{k} {end} {after}".strip()

        if "string" in types and not (values and all(isinstance(value, str) for value in values)):
            return [f"after_{i}_{k}: {self._alternatives(i, k, keys, required, after_text)}", *rules]
        if "string" in types:
            rules.append(f"value_{i}_{k}: {' | '.join(_quoted(value) for value in values)}")
        else:
            shared = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
            own = {"x-guidance": _ONE_LINE, **shared, **(schema if isinstance(schema, Mapping) else {})}
            rules.append(f"value_{i}_{k}: %json {json.dumps(own)}")
        return [f"after_{i}_{k}: {self._alternatives(i, k, keys, required, after_value)}", *rules]

    def _alternatives(
        self, i: int, k: int, keys: Sequence[str], required: Sequence[bool], write: Callable[[str, str], str]
    ) -> str:
        """What may follow parameter k: any later one up to the next that is required; after all of these, the end."""
        found = []
        for later in range(k + 1, len(keys)):
            found.append(write(f"{PARAMETER}{keys[later]}>\n", f"after_{i}_{later}"))
            if required[later]:
                break
        else:
            found.append(write(f"{END_FUNCTION}\n", ""))
        return " | ".join(found)


def _mark(mark: str, mark_ids: Mapping[str, int]) -> str:
    return f"<[{mark_ids[mark]}]>" if mark in mark_ids else _quoted(mark)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _in_lark(pattern: str) -> str:
    """A pattern between slashes on one line."""
    return re.sub(r"\\.|/|\n", lambda m: {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(m[0], m[0]), pattern, flags=re.S)
