"""Random JSON schemas whose values are of limited length, so that an answer can end."""

from __future__ import annotations

import random
from typing import Any

NAMES = "name age kind id title count ok tags note list".split()


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = [string, number, enumeration, boolean, nullable, constant]
    return rng.choice(kinds + [array, record, record, either] * (depth < 2))(rng, depth)


def random_object_schema(seed: int) -> dict[str, Any]:
    return record(random.Random(seed), 0)


def string(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {
            "type": "string",
            "pattern": rng.choice(["^[a-z]{1,5}$", "^[0-9]{3}-[0-9]{2}$", "^(a|b)+c?$"]),
            "maxLength": 8,
        }
    return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(3, 12)}


def number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-20, 20)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)}


def boolean(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def nullable(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth + 1), {"type": "null"}]}


def constant(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice([1, "one", True, None, [1, "a"], {"a": 1}])}


def enumeration(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(["red", "green", 'qu"oted', "line\nbreak", "ä😀", 7, None, False], rng.randint(1, 4))}


def either(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}


def array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {
        "type": "array",
        "items": random_schema(rng, depth + 1),
        "minItems": low,
        "maxItems": low + rng.randint(0, 2),
    }


def record(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }
