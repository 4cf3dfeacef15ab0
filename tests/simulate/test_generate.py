"""Made-up traces: repeatable, and what their kind says."""

from __future__ import annotations

from typing import Any

import pytest

from hemiola.errors import ConfigError
from hemiola.simulate.generate import KINDS, generate_trace
from hemiola.simulate.trace import Arrival, Segment, read_trace, write_arrival


def make(kind: str, **options: Any) -> list[Arrival]:
    return list(generate_trace(kind, {"num_requests": 30, **options}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_repeats_and_the_trace_reads_back(kind: str) -> None:
    arrivals = make(kind)
    assert len(arrivals) == 30
    assert make(kind) == arrivals
    assert make(kind, seed=1) != arrivals
    assert read_trace(map(write_arrival, arrivals), "t") == arrivals


def test_the_mean_length_and_rate_are_those_asked_for() -> None:
    arrivals = make("poisson", num_requests=4000, rate_per_s=5.0, prompt_tokens=60, output_tokens=20)
    prompts = [part.num_tokens for a in arrivals for part in a.prompt if isinstance(part, Segment)]
    assert sum(prompts) / 4000 == pytest.approx(60, rel=0.05)
    assert sum(a.output_tokens for a in arrivals) / 4000 == pytest.approx(20, rel=0.05)
    assert arrivals[-1].time_s == pytest.approx(800, rel=0.05)
    assert len({a.prompt for a in arrivals}) == 4000


def test_shared_prefixes() -> None:
    arrivals = make("shared-prefix", shared_tokens=77, num_prefixes=3)
    assert {a.prompt[0] for a in arrivals} == {Segment(f"system {index}", 77) for index in range(3)}
    assert len({a.prompt[1] for a in arrivals}) == 30


def test_chats() -> None:
    arrivals = make("chat", num_turns=10, shared_tokens=77)
    firsts = [a for a in arrivals if a.follow_up_of is None]
    assert [a.prompt[0] for a in firsts] == [Segment("system", 77)] * 3
    assert [(a.request_id, a.follow_up_of) for a in arrivals[1:10]] == [(f"0.{i}", f"0.{i - 1}") for i in range(1, 10)]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("poison", {}, "--generate: unknown kind of trace; found 'poison'"),
        ("poisson", {"num_turns": 2, "shared_tokens": 3}, "num_turns, shared_tokens: a poisson trace does not use it"),
        ("chat", {"num_prefixes": 2}, "num_prefixes: a chat trace does not use it"),
        ("chat", {"num_turns": 0}, "num_turns: not a supported value; found 0"),
        ("poisson", {"rate_per_s": 0.0}, "rate_per_s: not a supported value; found 0.0"),
    ],
)
def test_refusals(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make(kind, **options)
    assert str(error.value).startswith(message)
