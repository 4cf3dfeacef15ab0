"""One pass over config.json: takes keys out by their spellings, remembers what became of each, and reads values.

Knows no key by name; the readers of single values (type, range, both JSON forms of an infinity) live here too.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hemiola.errors import ConfigError

ABSENT = object()
_JSON_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def shown(value: object) -> str:
    """`value` as the file spells it, cut to a readable length."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 120 else text[:117] + "..."


def wrong(value: object, expected: str, where: str) -> ConfigError:
    return ConfigError("not a supported value", found=shown(value), expected=expected, where=where)


def integer(at_least: int) -> Callable[[object, str], int]:
    """Reader of an integer; true, 4.0 and "4" are none."""

    def read(value: object, where: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            raise wrong(value, f"an integer of at least {at_least}", where)
        return value

    return read


def null_or(read: Callable[[object, str], Any]) -> Callable[[object, str], Any]:
    return lambda value, where: None if value is None else read(value, where)


def number(value: object, where: str) -> float:
    """A JSON number, or an infinity as the bare literal (parsed already) or as {"__float__": "Infinity"}."""
    plain = _JSON_FLOATS.get(str(value["__float__"])) if isinstance(value, Mapping) and "__float__" in value else value
    if not isinstance(plain, int | float) or isinstance(plain, bool):
        raise wrong(value, "a number", where)
    try:
        result = float(plain)
    except OverflowError:  # an integer literal beyond float64
        result = math.nan
    if math.isnan(result):
        raise wrong(value, "a number", where)
    return result


def positive(value: object, where: str) -> float:
    result = number(value, where)
    if not 0.0 < result < math.inf:
        raise wrong(value, "a finite number above 0", where)
    return result


def flag(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise wrong(value, "true or false", where)
    return value


def one_of(*accepted: str) -> Callable[[object, str], str]:
    def read(value: object, where: str) -> str:
        if not isinstance(value, str) or value not in accepted:
            raise wrong(value, " or ".join(shown(text) for text in accepted), where)
        return value

    return read


def interval(value: object, where: str) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise wrong(value, "a list of two numbers [low, high]", where)
    low, high = number(value[0], where), number(value[1], where)
    if not 0.0 <= low <= high or low == math.inf or high == 0.0:
        raise wrong(value, "two numbers with 0 <= low <= high, low finite and high above 0", where)
    return low, high


def sizes(value: object, where: str) -> tuple[int, ...]:
    """One positive integer or a list of them."""
    if isinstance(value, list | tuple) and value:
        return tuple(integer(1)(size, where) for size in value)
    return (integer(1)(value, where),)


def token_ids(value: object, where: str) -> tuple[int, ...]:
    """One token id, a list of them, or null for none."""
    if value is None:
        return ()
    if isinstance(value, list | tuple):
        return tuple(integer(0)(token, where) for token in value)
    return (integer(0)(value, where),)


def block(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise wrong(value, "an object or null", where)
    return copy.deepcopy(dict(value))


@dataclass(slots=True)
class Reading:
    """One pass over one file: hands keys out and remembers what became of each.

    used: field -> the spelling that gave its value; inert: keys that change nothing; overruled: keys that another
    spelling wins over with a different value, each named in warnings too.
    """

    raw: Mapping[str, object]
    file: str
    warnings: list[str] = field(default_factory=list)
    inert: list[str] = field(default_factory=list)
    overruled: list[str] = field(default_factory=list)
    used: dict[str, str] = field(default_factory=dict)

    def at(self, key: str) -> str:
        """The place of a key, for messages."""
        return f"{self.file}: {key}"

    def where(self, field_name: str) -> str:
        """The place of the key that gave a field its value."""
        return self.at(self.used[field_name])

    def take(self, field_name: str, spellings: tuple[str, ...], nullable: bool = False) -> object:
        """The value of the first spelling present, or ABSENT when none is; the others are accounted for."""
        result = ABSENT
        for spelling in spellings:
            if spelling not in self.raw:
                continue
            value = self.raw[spelling]
            if result is ABSENT and not (nullable and value is None):
                result, self.used[field_name] = value, spelling
            elif result is ABSENT or value is None or value == result:
                self.inert.append(spelling)
            else:
                self.overrule(spelling, self.used[field_name])
        return result

    def overrule(self, loser: str, winner: str) -> None:
        self.overruled.append(loser)
        self.warnings.append(
            f"{self.at(loser)}: {shown(self.raw[loser])} is overruled by {winner} {shown(self.raw[winner])}"
        )
