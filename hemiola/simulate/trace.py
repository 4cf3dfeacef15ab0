"""Traces: who arrives when, with which prompt. JSON Lines, one arrival per line; blank lines are skipped.

    {"request_id": "a", "time_s": 0.5, "prompt": [["system", 1000], ["question 1", 40]], "output_tokens": 64}
    {"follow_up_of": "a", "think_s": 8, "prompt": [["question 2", 30]], "output_tokens": 64, "abort_after_s": 2}
    {"time_s": 0.7, "prompt": [17, 4, 4, 99], "output_tokens": 16, "priority": -1}

request_id: by default "line N". prompt: token ids, or segments [name, length]: token i of a segment is the same
wherever the segment's name is the same, and differs from every other segment's, from every id and from every output, so
that shared prefixes are said by names. output_tokens: how many the request generates (its max_tokens).
follow_up_of: an earlier line's request: a further turn, whose prompt is all tokens of that one (its prompt and what it
said until it ended or was aborted), then `prompt`; it arrives think_s (default 0) after that one's end, and has no
time_s. When that one was refused, so is this.
priority: lower runs first; default 0. abort_after_s: withdrawn so long after its arrival, if it has not ended.

Ids are not checked against a vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from hemiola.config.reading import integer, number, shown, wrong
from hemiola.errors import ConfigError

MAX_PROMPT_TOKENS = 1 << 22  # beyond every model of the family; keeps a mistyped length from filling the memory
MAX_TOKEN_ID = (1 << 31) - 1

_KEYS = {
    *("request_id", "time_s", "follow_up_of", "think_s"),
    *("prompt", "output_tokens", "priority", "abort_after_s"),
}


class Segment(NamedTuple):
    name: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """One line. time_s is None for a follow-up, whose time is its predecessor's end plus think_s. Times in seconds."""

    request_id: str
    prompt: tuple[int, ...] | tuple[Segment, ...]
    output_tokens: int
    time_s: float | None = None
    follow_up_of: str | None = None
    think_s: float = 0.0
    priority: int = 0
    abort_after_s: float | None = None


def read_trace(lines: Iterable[str], where: str) -> list[Arrival]:
    """The arrivals of a trace; `where` names it in errors. Raises: ConfigError naming the line and the key."""
    arrivals: dict[str, Arrival] = {}
    for index, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{where} line {index}"
        arrival = _read_arrival(_parse(line, place), f"line {index}", place)
        if arrival.request_id in arrivals:
            raise ConfigError("used before", found=shown(arrival.request_id), where=f"{place}: request_id")
        if arrival.follow_up_of is not None and arrival.follow_up_of not in arrivals:
            raise wrong(arrival.follow_up_of, "the request_id of an earlier line", f"{place}: follow_up_of")
        arrivals[arrival.request_id] = arrival
    if not arrivals:
        raise ConfigError("the trace is empty", expected="a line of JSON per arrival", where=where)
    return list(arrivals.values())


def write_arrival(arrival: Arrival) -> str:
    """Its line, without what is at its default."""
    values: dict[str, Any] = {"request_id": arrival.request_id}
    if arrival.follow_up_of is None:
        values["time_s"] = arrival.time_s
    else:
        values |= {"follow_up_of": arrival.follow_up_of, "think_s": arrival.think_s}
    values |= {"prompt": arrival.prompt, "output_tokens": arrival.output_tokens}
    if arrival.priority:
        values["priority"] = arrival.priority
    if arrival.abort_after_s is not None:
        values["abort_after_s"] = arrival.abort_after_s
    return json.dumps(values)


def _parse(line: str, where: str) -> dict[str, Any]:
    def build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            raise ConfigError("a key is given twice", found=", ".join(key for key, _ in pairs), where=where)
        return result

    try:
        raw = json.loads(line, object_pairs_hook=build_object)
    except (ValueError, RecursionError) as error:
        raise ConfigError("not valid JSON", found=error, where=where) from error
    if not isinstance(raw, dict):
        raise wrong(raw, "an object of keys", where)
    if unknown := sorted(raw.keys() - _KEYS):
        raise ConfigError("unknown key", found=", ".join(unknown), expected=", ".join(sorted(_KEYS)), where=where)
    return raw


def _read_arrival(raw: dict[str, Any], default_id: str, where: str) -> Arrival:
    for key in ("prompt", "output_tokens"):
        if key not in raw:
            raise ConfigError("missing", expected=f"the key {key}", where=where)
    is_follow_up = "follow_up_of" in raw
    if ("time_s" in raw) is is_follow_up or ("think_s" in raw and not is_follow_up):
        expected = "time_s, or follow_up_of with or without think_s"
        raise ConfigError("when it arrives is not clear", found=", ".join(raw), expected=expected, where=where)
    return Arrival(
        request_id=_text(raw.get("request_id", default_id), f"{where}: request_id"),
        prompt=_prompt(raw["prompt"], f"{where}: prompt"),
        output_tokens=integer(1)(raw["output_tokens"], f"{where}: output_tokens"),
        time_s=None if is_follow_up else _seconds(raw["time_s"], f"{where}: time_s"),
        follow_up_of=_text(raw["follow_up_of"], f"{where}: follow_up_of") if is_follow_up else None,
        think_s=_seconds(raw.get("think_s", 0), f"{where}: think_s"),
        priority=integer(-MAX_TOKEN_ID)(raw.get("priority", 0), f"{where}: priority"),
        abort_after_s=_seconds(raw["abort_after_s"], f"{where}: abort_after_s") if "abort_after_s" in raw else None,
    )


def _prompt(value: object, where: str) -> tuple[int, ...] | tuple[Segment, ...]:
    if not isinstance(value, list) or not value:
        raise wrong(value, "a list of token ids, or of segments [name, length]", where)
    if isinstance(value[0], list):
        segments = tuple(_segment(entry, f"{where}[{index}]") for index, entry in enumerate(value))
        total = sum(segment.num_tokens for segment in segments)
        if total > MAX_PROMPT_TOKENS:
            raise ConfigError("too long", found=f"{total} tokens", expected=f"at most {MAX_PROMPT_TOKENS}", where=where)
        return segments
    for index, token in enumerate(value):
        if integer(0)(token, f"{where}[{index}]") > MAX_TOKEN_ID:
            raise wrong(token, f"a token id up to {MAX_TOKEN_ID}", f"{where}[{index}]")
    return tuple(value)


def _segment(value: object, where: str) -> Segment:
    if not isinstance(value, list) or len(value) != 2:
        raise wrong(value, "a segment [name, length]", where)
    return Segment(_text(value[0], where), integer(1)(value[1], where))


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise wrong(value, "a text that is not empty", where)
    return value


def _seconds(value: object, where: str) -> float:
    result = number(value, where)
    if not 0.0 <= result < math.inf:
        raise wrong(value, "a finite number of seconds, 0 or more", where)
    return result
