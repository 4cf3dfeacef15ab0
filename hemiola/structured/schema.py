"""JSON schemas as clients send them: what is wrong with one, and where in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from hemiola.errors import RequestError

MAX_DEPTH = 64
MAX_PARTS = 500  # looked at to find the one that is at fault
TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SINGLE = ("additionalProperties", "unevaluatedProperties", "propertyNames", "not", "if", "then", "else", "contains")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TEXTS = ("pattern", "format", "$ref")


def check_schema(schema: object, where: str) -> None:
    """Raises: RequestError that names the path (`where.properties.age.type`) of the first thing that is no schema."""
    for path, part in subschemas(schema, where):
        if isinstance(part, bool):
            continue
        if not isinstance(part, Mapping):
            raise RequestError("not a schema", found=repr(part)[:80], expected="an object, true or false", where=path)
        _check_keywords(part, path)
        reference = part.get("$ref")
        if isinstance(reference, str):
            _check_reference(schema, reference, f"{path}.$ref")


def subschemas(schema: object, where: str, depth: int = 0) -> Iterator[tuple[str, object]]:
    """A schema and all schemas in it, with their paths; each before what is in it. Raises: RequestError where they are
    nested too deeply."""
    yield where, schema
    if not isinstance(schema, Mapping):
        return
    if depth == MAX_DEPTH:
        raise RequestError("nested too deeply", expected=f"at most {MAX_DEPTH} levels", where=where[:200])
    for keyword in _NAMED:
        if isinstance(parts := schema.get(keyword), Mapping):
            for name, part in parts.items():
                yield from subschemas(part, f"{where}.{keyword}.{name}", depth + 1)
    for keyword in _SINGLE:
        if keyword in schema:
            yield from subschemas(schema[keyword], f"{where}.{keyword}", depth + 1)
    for keyword in (*_LISTS, "items"):
        if isinstance(parts := schema.get(keyword), list | tuple):
            for i, part in enumerate(parts):
                yield from subschemas(part, f"{where}.{keyword}[{i}]", depth + 1)
        elif keyword == "items" and keyword in schema:
            yield from subschemas(schema[keyword], f"{where}.items", depth + 1)


def rerooted(schema: Any, path: str) -> Any:
    """A schema whose own references ("#/$defs/x") hold where it stands at `path` ("/items") in another."""
    if isinstance(schema, Mapping):
        parts = {key: rerooted(value, path) for key, value in schema.items()}
        if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
            parts["$ref"] = f"#{path}{reference[1:]}"
        return parts
    return [rerooted(item, path) for item in schema] if isinstance(schema, list) else schema


def narrowest(schema: object, where: str, fault: Callable[[object], str]) -> tuple[str, str]:
    """Path and fault of the smallest part of a faulty schema that is faulty by itself. fault: what is wrong, or ""."""
    found = where, fault(schema)
    definitions = {
        key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, Mapping) and key in schema
    }
    for path, part in islice(subschemas(schema, where), 1, MAX_PARTS):
        if isinstance(part, Mapping) and path.startswith(found[0]) and (problem := fault({**definitions, **part})):
            found = path, problem
    return found


def _check_keywords(schema: Mapping[str, object], path: str) -> None:
    types = schema.get("type", [])
    for name in types if isinstance(types, list | tuple) else [types]:
        if name not in TYPES:
            raise RequestError("no such type", found=repr(name)[:80], expected=", ".join(TYPES), where=f"{path}.type")
    for keywords, is_right, expected in (
        (_NAMED, lambda value: isinstance(value, Mapping), "an object of schemas"),
        (_LISTS, lambda value: isinstance(value, list | tuple) and len(value) > 0, "a list of schemas"),
        (_COUNTS, lambda value: _is_number(value) and value >= 0 and value == int(value), "a whole number"),
        (_LIMITS, _is_number, "a number"),
        (_TEXTS, lambda value: isinstance(value, str), "a text"),
        (("enum",), lambda value: isinstance(value, list | tuple) and len(value) > 0, "a list of values"),
        (("required",), _is_list_of_names, "a list of names"),
    ):
        for keyword in keywords:
            if keyword in schema and not is_right(schema[keyword]):
                raise RequestError(
                    "not usable", found=repr(schema[keyword])[:80], expected=expected, where=f"{path}.{keyword}"
                )
    if "x-guidance" in schema:
        raise RequestError("no keyword of JSON schemas", where=f"{path}.x-guidance")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value - value == 0


def _is_list_of_names(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)


def _check_reference(root: object, reference: str, path: str) -> None:
    found: Any = root if reference[:1] == "#" else None
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isdecimal():
            found = found[int(step)] if int(step) < len(found) else None
        else:
            found = found.get(step) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping | bool):
        raise RequestError(
            "a reference to nothing",
            found=reference[:80],
            expected="a part of this schema, as #/$defs/name",
            where=path,
        )
