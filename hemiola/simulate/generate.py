"""Made-up traces of three kinds, the same for the same options and seed.

poisson: arrivals at random, nothing shared. shared-prefix: the same, each prompt behind one of a few system prompts.
chat: conversations that start at random, each of several turns, all behind one system prompt.
Lengths are exponential around their means, from 1 to 8 times the mean; gaps and times to think are exponential.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from hemiola.config.reading import integer, positive
from hemiola.errors import ConfigError
from hemiola.simulate.trace import Arrival, Segment

LONGEST = 8  # times the mean


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """num_requests: lines in all (chat: turns of all conversations). rate_per_s: arrivals, or conversations, a second.
    prompt_tokens, output_tokens: means; of a chat, per turn. shared_tokens: of each system prompt, exactly.
    num_prefixes: system prompts. num_turns: per conversation. think_s: mean time from an answer to the next turn.
    """

    num_requests: int = 1000
    rate_per_s: float = 4.0
    prompt_tokens: int = 200
    output_tokens: int = 100
    shared_tokens: int = 1000
    num_prefixes: int = 4
    num_turns: int = 8
    think_s: float = 10.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rate_per_s", "think_s"):
            positive(getattr(self, name), name)
        for name in ("num_requests", "prompt_tokens", "output_tokens", "shared_tokens", "num_prefixes", "num_turns"):
            integer(1)(getattr(self, name), name)


_FOR_ALL = {"num_requests", "rate_per_s", "prompt_tokens", "output_tokens", "seed"}


def generate_trace(kind: str, given: Mapping[str, Any]) -> Iterator[Arrival]:
    """The arrivals of a kind. given: fields of TraceOptions, others at their defaults.

    Raises: ConfigError for an unknown kind, an option that the kind does not use, a value out of range.
    """
    if kind not in KINDS:
        raise ConfigError("unknown kind of trace", found=repr(kind), expected=", ".join(KINDS), where="--generate")
    make, own = KINDS[kind]
    if unused := given.keys() - _FOR_ALL - own:
        raise ConfigError(f"a {kind} trace does not use it", where=", ".join(sorted(unused)))
    options = TraceOptions(**given)
    return make(options, random.Random(options.seed))


def _poisson(options: TraceOptions, rng: random.Random) -> Iterator[Arrival]:
    time_s = 0.0
    for index in range(options.num_requests):
        time_s += rng.expovariate(options.rate_per_s)
        prompt = Segment(f"prompt {index}", _length(rng, options.prompt_tokens))
        yield Arrival(str(index), (prompt,), _length(rng, options.output_tokens), round(time_s, 6))


def _shared_prefix(options: TraceOptions, rng: random.Random) -> Iterator[Arrival]:
    for arrival in _poisson(options, rng):
        system = Segment(f"system {rng.randrange(options.num_prefixes)}", options.shared_tokens)
        yield Arrival(arrival.request_id, (system, *arrival.prompt), arrival.output_tokens, arrival.time_s)


def _chat(options: TraceOptions, rng: random.Random) -> Iterator[Arrival]:
    system, time_s = Segment("system", options.shared_tokens), 0.0
    for index in range(options.num_requests):
        conversation, turn = divmod(index, options.num_turns)
        name = f"{conversation}.{turn}"
        said = Segment(f"user {name}", _length(rng, options.prompt_tokens))
        length = _length(rng, options.output_tokens)
        if turn == 0:
            time_s += rng.expovariate(options.rate_per_s)
            yield Arrival(name, (system, said), length, round(time_s, 6))
        else:
            think_s = round(rng.expovariate(1 / options.think_s), 6)
            yield Arrival(name, (said,), length, follow_up_of=f"{conversation}.{turn - 1}", think_s=think_s)


def _length(rng: random.Random, mean: int) -> int:
    return min(max(1, round(rng.expovariate(1 / mean))), LONGEST * mean)


KINDS: dict[str, tuple[Callable[[TraceOptions, random.Random], Iterator[Arrival]], set[str]]] = {
    "poisson": (_poisson, set()),
    "chat": (_chat, {"shared_tokens", "num_turns", "think_s"}),
    "shared-prefix": (_shared_prefix, {"shared_tokens", "num_prefixes"}),
}
"""Maker of each kind, and the options that it uses beside those of all."""

DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(TraceOptions)}
