"""Traces: what a line says, and what it may not say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hemiola.errors import ConfigError
from hemiola.simulate.trace import MAX_PROMPT_TOKENS, Arrival, Segment, read_trace, write_arrival


def read(*lines: dict[str, Any] | str) -> list[Arrival]:
    return read_trace([line if isinstance(line, str) else json.dumps(line) for line in lines], "t.jsonl")


def line(**changes: Any) -> dict[str, Any]:
    values = {"time_s": 1, "prompt": [["a", 4]], "output_tokens": 2, **changes}
    return {name: value for name, value in values.items() if value is not None}


def test_all_keys_and_their_defaults() -> None:
    assert read(
        line(),
        "  ",
        line(request_id="x", time_s=0.25, prompt=[7, 0], output_tokens=3, priority=-2, abort_after_s=4),
        line(time_s=None, follow_up_of="x", think_s=1.5),
        line(time_s=None, follow_up_of="line 1"),
    ) == [
        Arrival("line 1", (Segment("a", 4),), 2, 1.0),
        Arrival("x", (7, 0), 3, 0.25, priority=-2, abort_after_s=4.0),
        Arrival("line 4", (Segment("a", 4),), 2, None, "x", 1.5),
        Arrival("line 5", (Segment("a", 4),), 2, None, "line 1", 0.0),
    ]


def test_what_is_written_is_read_again() -> None:
    arrivals = [
        Arrival("x", (7, 0), 3, 0.25, priority=-2, abort_after_s=4.0),
        Arrival("y", (Segment("a", 4), Segment("b", 1)), 2, None, "x", 1.5),
    ]
    assert read(*map(write_arrival, arrivals)) == arrivals


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "t.jsonl line 2: not valid JSON"),
        ("[1]", "t.jsonl line 2: not a supported value; found [1]; expected an object of keys"),
        ('{"time_s": 1, "time_s": 2}', "t.jsonl line 2: a key is given twice"),
        (line(promt=[1]), "t.jsonl line 2: unknown key; found promt; expected"),
        (line(prompt=None), "t.jsonl line 2: missing; expected the key prompt"),
        (line(output_tokens=None), "t.jsonl line 2: missing; expected the key output_tokens"),
        (line(output_tokens=0), "t.jsonl line 2: output_tokens: not a supported value; found 0"),
        (line(output_tokens=True), "t.jsonl line 2: output_tokens: not a supported value; found true"),
        (line(time_s=None), "t.jsonl line 2: when it arrives is not clear"),
        (line(follow_up_of="line 1"), "t.jsonl line 2: when it arrives is not clear"),
        (line(think_s=1), "t.jsonl line 2: when it arrives is not clear"),
        (line(time_s=-1), "t.jsonl line 2: time_s: not a supported value; found -1"),
        ('{"time_s": Infinity, "prompt": [1], "output_tokens": 1}', "t.jsonl line 2: time_s: not a supported value"),
        (line(abort_after_s="soon"), 't.jsonl line 2: abort_after_s: not a supported value; found "soon"'),
        (line(priority=0.5), "t.jsonl line 2: priority: not a supported value; found 0.5"),
        (line(prompt=[]), "t.jsonl line 2: prompt: not a supported value; found []"),
        (line(prompt="a"), 't.jsonl line 2: prompt: not a supported value; found "a"'),
        (line(prompt=[1, -1]), "t.jsonl line 2: prompt[1]: not a supported value; found -1"),
        (line(prompt=[1, 1 << 31]), "t.jsonl line 2: prompt[1]: not a supported value; found 2147483648"),
        (line(prompt=[1, ["a", 2]]), "t.jsonl line 2: prompt[1]: not a supported value"),
        (line(prompt=[["a", 2], 1]), "t.jsonl line 2: prompt[1]: not a supported value; found 1; expected a segment"),
        (line(prompt=[["a"]]), "t.jsonl line 2: prompt[0]: not a supported value"),
        (line(prompt=[["", 1]]), "t.jsonl line 2: prompt[0]: not a supported value"),
        (line(prompt=[["a", 0]]), "t.jsonl line 2: prompt[0]: not a supported value; found 0"),
        (line(prompt=[["a", MAX_PROMPT_TOKENS], ["b", 1]]), "t.jsonl line 2: prompt: too long; found 4194305 tokens"),
        (line(request_id=3), "t.jsonl line 2: request_id: not a supported value; found 3"),
        (line(request_id="line 1"), 't.jsonl line 2: request_id: used before; found "line 1"'),
        (line(time_s=None, follow_up_of="line 2"), "t.jsonl line 2: follow_up_of: not a supported value"),
    ],
)
def test_a_mistake_is_told_with_its_line(bad: dict[str, Any] | str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(line(), bad)
    assert str(error.value).startswith(message)


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"t\.jsonl: the trace is empty"):
        read("", "\n")
