"""How one request wants its tokens chosen, and when it ends. Knows no tokenizer, no model and no request.

Every field is checked on construction, so that whatever reaches the engine is well-formed; ids are checked against the
vocabulary by `SamplingParams.validate_for`, once the model is known. All defaults of sampling live here.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hemiola.errors import RequestError

WHOLE_VOCABULARY = -1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling parameters; names, ranges and meaning are vLLM's unless said otherwise.

    Construction normalises: `stop` becomes a tuple of strings (a single string is one stop), `stop_token_ids` and
    `forced_output_ids` become tuples of int, `logit_bias` a dict from int to float (decimal strings are taken as ids,
    because JSON has no other keys).

    n: answers per prompt, each with a seed of its own.
    max_tokens, min_tokens: new tokens; until `min_tokens` are out, no id that would end the request can be chosen.
    temperature: 0 is greedy.
    top_k: 0 and -1 mean no limit. top_p in (0, 1], min_p in [0, 1].
    seed: any int64; None lets the engine pick one.
    logprobs, prompt_logprobs: how many alternatives to report per token; -1 is the whole vocabulary, None is none.
    forced_output_ids: these ids are emitted in place of the sampled ones while they last (teacher forcing).

    Raises: RequestError, with the field in its `where`.
    """

    n: int = 1
    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    forced_output_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        checked: dict[str, object] = {
            "n": _integer("n", self.n, low=1),
            "max_tokens": _integer("max_tokens", self.max_tokens, low=1),
            "min_tokens": _integer("min_tokens", self.min_tokens, low=0),
            "temperature": _number("temperature", self.temperature, low=0.0),
            "top_k": _integer("top_k", self.top_k, low=-1),
            "top_p": _number("top_p", self.top_p, above=0.0, high=1.0),
            "min_p": _number("min_p", self.min_p, low=0.0, high=1.0),
            "repetition_penalty": _number("repetition_penalty", self.repetition_penalty, above=0.0),
            "presence_penalty": _number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0),
            "stop": _stop_strings(self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
        }
        if self.logit_bias is not None:
            checked["logit_bias"] = _logit_bias(self.logit_bias)
        if self.seed is not None:
            checked["seed"] = _integer("seed", self.seed, low=-(2**63), high=2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                checked[name] = _integer(name, count, low=WHOLE_VOCABULARY)
        if self.forced_output_ids is not None:
            checked["forced_output_ids"] = _token_ids("forced_output_ids", self.forced_output_ids)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(flag := getattr(self, name), bool):
                raise RequestError("not a truth value", found=repr(flag), expected="true or false", where=name)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                "more tokens are required than allowed",
                found=self.min_tokens,
                expected=f"at most max_tokens = {self.max_tokens}",
                where="min_tokens",
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the best id is taken at every position."""
        return self.temperature == 0.0

    def validate_for(self, vocab_size: int) -> None:
        """Check every id and count against the model's vocabulary (the rows of its logits, padding included).

        Raises: RequestError that names the field and the id.
        """
        named = [(f"logit_bias[{token_id}]", token_id) for token_id in self.logit_bias or ()]
        named += [(f"stop_token_ids[{i}]", token_id) for i, token_id in enumerate(self.stop_token_ids)]
        named += [(f"forced_output_ids[{i}]", token_id) for i, token_id in enumerate(self.forced_output_ids or ())]
        for where, token_id in named:
            if token_id >= vocab_size:
                raise RequestError("no such token id", found=token_id, expected=f"0 to {vocab_size - 1}", where=where)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and count > vocab_size:
                raise RequestError(
                    "more alternatives than the vocabulary holds",
                    found=count,
                    expected=f"at most {vocab_size}, or -1 for all",
                    where=name,
                )


def _integer(where: str, value: object, *, low: int, high: int | None = None) -> int:
    """`value` as an int. Integers of other libraries (numpy) are taken; truth values and floats are not."""
    expected = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise RequestError("not a whole number", found=repr(value), expected=expected, where=where)
    number = int(value)
    if number < low or (high is not None and number > high):
        raise RequestError("out of range", found=number, expected=expected, where=where)
    return number


def _number(
    where: str, value: object, *, low: float | None = None, above: float | None = None, high: float | None = None
) -> float:
    """`value` as a finite float, at least `low` or strictly above `above`, and at most `high`."""
    bounds = [f"at least {low:g}" if low is not None else f"above {above:g}"]
    bounds += [] if high is None else [f"at most {high:g}"]
    expected = "a finite number, " + " and ".join(bounds)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise RequestError("not a number", found=repr(value), expected=expected, where=where)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    in_range = (low is None or number >= low) and (above is None or number > above) and (high is None or number <= high)
    if not math.isfinite(number) or not in_range:
        raise RequestError("out of range", found=repr(value), expected=expected, where=where)
    return number


def _token_ids(where: str, value: object) -> tuple[int, ...]:
    return tuple(_integer(f"{where}[{i}]", token_id, low=0) for i, token_id in enumerate(_items(where, value)))


def _stop_strings(value: object) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else _items("stop", value)
    for i, stop in enumerate(stops):
        if not isinstance(stop, str) or not stop:
            raise RequestError("not a stop string", found=repr(stop), expected="a non-empty string", where=f"stop[{i}]")
    return tuple(str(stop) for stop in stops)


def _items(where: str, value: object) -> tuple[object, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RequestError("not a list", found=repr(value), expected="a list", where=where)
    return tuple(value)


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise RequestError(
            "not a mapping", found=repr(value), expected="token ids with their biases", where="logit_bias"
        )
    biases: dict[int, float] = {}
    for key, bias in value.items():
        where = f"logit_bias[{key!r}]"
        is_decimal = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20
        token_id = _integer(where, int(key) if is_decimal else key, low=0)
        if token_id in biases:
            raise RequestError("the same token id twice", found=token_id, expected="one bias per id", where=where)
        biases[token_id] = _number(where, bias, low=-100.0, high=100.0)
    return biases
