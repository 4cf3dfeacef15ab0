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
class StructuredSpec:
    """What an answer has to look like; exactly one of the first five is given.

    json_object: any JSON object. json_schema: a value of this JSON schema (a mapping, or a truth value).
    regex: a text that this pattern matches as a whole. choice: one of these texts.
    tools: at least one call of one of these tools (OpenAI's form), in the model's own format; several only with
        parallel_tool_calls.

    The schema itself is checked when it is compiled (hemiola.structured). Raises: RequestError.
    """

    json_object: bool = False
    json_schema: Mapping[str, object] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] = ()
    tools: Sequence[Mapping[str, object]] = ()
    parallel_tool_calls: bool = True

    def __post_init__(self) -> None:
        for name in ("json_object", "parallel_tool_calls"):
            if not isinstance(flag := getattr(self, name), bool):
                raise RequestError(
                    "not a truth value", found=repr(flag), expected="true or false", where=f"structured.{name}"
                )
        if self.json_schema is not None and not isinstance(self.json_schema, Mapping | bool):
            raise RequestError(
                "not a schema", found=repr(self.json_schema)[:80], expected="an object", where="structured.json_schema"
            )
        if self.regex is not None and not isinstance(self.regex, str):
            raise RequestError("not a pattern", found=repr(self.regex)[:80], where="structured.regex")
        object.__setattr__(self, "choice", _items("structured.choice", self.choice))
        object.__setattr__(self, "tools", _items("structured.tools", self.tools))
        for i, text in enumerate(self.choice):
            if not isinstance(text, str) or not text:
                raise RequestError(
                    "not a choice",
                    found=repr(text)[:80],
                    expected="a non-empty string",
                    where=f"structured.choice[{i}]",
                )
        for i, tool in enumerate(self.tools):
            if not isinstance(tool, Mapping):
                raise RequestError("not a tool", found=repr(tool)[:80], where=f"structured.tools[{i}]")
        given = [name for name in STRUCTURES if getattr(self, name) not in (None, False, ())]
        given += ["json_schema"] if self.json_schema is False else []
        if len(given) != 1:
            raise RequestError(
                "exactly one structure is needed",
                found=", ".join(given) or "none",
                expected=f"one of {', '.join(STRUCTURES)}",
                where="structured",
            )


STRUCTURES = ("json_object", "json_schema", "regex", "choice", "tools")


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
    structured: what the answer has to look like, after its thinking part. It ends the request itself, so it takes
        neither `min_tokens` nor `ignore_eos`.
    thinking_budget: ids that an answer that begins inside of a thought may think before the end of the thought is
        forced.

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
    structured: StructuredSpec | None = None
    thinking_budget: int | None = None

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
        if self.thinking_budget is not None:
            checked["thinking_budget"] = _integer("thinking_budget", self.thinking_budget, low=0)
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
        if self.structured is not None:
            self._check_beside_structured(self.structured)

    def _check_beside_structured(self, structured: object) -> None:
        if not isinstance(structured, StructuredSpec):
            raise RequestError(
                "not a structure", found=repr(structured)[:80], expected="a StructuredSpec", where="structured"
            )
        for name, value in (("min_tokens", self.min_tokens), ("ignore_eos", self.ignore_eos)):
            if value:
                raise RequestError(
                    "cannot be kept beside structured output, which decides itself when it ends",
                    found=value,
                    where=name,
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
