"""Compiled grammars of one model, and the constraints of its requests."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from hemiola.config.sampling import SamplingParams, StructuredSpec
from hemiola.engine.constraint import LogitsConstraint
from hemiola.errors import RequestError
from hemiola.structured.grammar import grammar_of
from hemiola.structured.schema import narrowest
from hemiola.structured.thinking import ThinkingConstraint, ThoughtMarks
from hemiola.text.chat_output import chat_format
from hemiola.text.reasoning import END_THINK, THINK, end_of_thought_ids, mark_ids, thinking_is_open
from hemiola.text.tokenizer import Tokenizer
from hemiola.text.tools import CALL, END_CALL, END_JSON_CALLS, JSON_CALLS

MAX_GRAMMARS = 64  # kept compiled, the last used ones
_TAIL = 64  # ids of a prompt's end in which marks that are no tokens are looked for


class Grammars:
    """One model's grammars. `check` may be called from any thread, also while another compiles.

    vocab_size: rows of the model's logits. eos_ids: what ends an answer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_ids = tuple(sorted(i for i in eos_ids if 0 <= i < vocab_size))
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def warm(self) -> None:
        """Read the vocabulary ahead of the first request that needs it; nothing where llguidance is not installed."""
        with contextlib.suppress(RequestError):
            _ = self._vocabulary

    def check(self, params: SamplingParams) -> None:
        """Compile what a request asks for, so that taking it up costs nothing.

        Raises: RequestError that names the field, and the path in a schema; also where llguidance is not installed.
        """
        if params.structured is not None:
            self._matcher(params.structured)

    def constraint(self, params: SamplingParams, prompt_ids: Sequence[int]) -> LogitsConstraint | None:
        """What a request's answer to the prompt may say; None when that is anything. Raises: as `check`."""
        answer = None
        if params.structured is not None:
            answer = GrammarConstraint(self._matcher(params.structured).deep_copy(), self._eos_ids)
        if (answer is None and params.thinking_budget is None) or not self._begins_in_thought(prompt_ids):
            return answer
        return ThinkingConstraint(self._thought_marks, params.thinking_budget, answer)

    def _matcher(self, spec: StructuredSpec) -> Any:
        key = _key(spec)
        with self._lock:
            if (matcher := self._compiled.get(key)) is not None:
                self._compiled.move_to_end(key)
                return matcher
        matcher = self._compile(spec)
        with self._lock:
            self._compiled[key] = matcher
            while len(self._compiled) > MAX_GRAMMARS:
                self._compiled.popitem(last=False)
        return matcher

    def _compile(self, spec: StructuredSpec) -> Any:
        matcher = self._try(grammar_of(spec, self._tool_format, self._mark_ids))
        if not matcher.is_error():
            return matcher
        where, problem = "structured", _first_line(matcher.get_error())
        if spec.json_schema is not None:
            where, problem = narrowest(spec.json_schema, "structured.json_schema", self._fault)
        elif spec.regex is not None:
            where = "structured.regex"
        elif spec.tools:
            where = "structured.tools"
            for i, tool in enumerate(spec.tools):
                function: Any = tool.get("function", tool)
                parameters = f"structured.tools[{i}].function.parameters"
                path, fault = narrowest(function.get("parameters") or {}, parameters, self._fault)
                if fault:
                    where, problem = path, fault
                    break
        raise RequestError("this structure cannot be enforced", found=problem, where=where)

    def _fault(self, schema: object) -> str:
        matcher = self._try(json.dumps({"grammars": [{"json_schema": schema}]}))
        problem = _first_line(matcher.get_error()) if matcher.is_error() else ""
        return "" if problem.startswith("Pointer") else problem  # references are checked before, and in the whole

    def _try(self, grammar: str) -> Any:
        limits = self._library.LLParserLimits(verbose_errors=False)
        return self._library.LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)

    @cached_property
    def _library(self) -> Any:
        try:
            import llguidance
        except ImportError as error:
            raise RequestError(
                "structured output needs llguidance, which is not installed here",
                where="structured",
                remedy="Install hemiola[structured].",
            ) from error
        return llguidance

    @cached_property
    def _vocabulary(self) -> Any:
        return self._library.LLTokenizer(
            self._tokenizer.definition, n_vocab=self._vocab_size, eos_token=list(self._eos_ids)
        )

    @cached_property
    def _tool_format(self) -> str | None:
        return chat_format(self._tokenizer.chat_template_source(with_tools=True)).tools

    @cached_property
    def _mark_ids(self) -> dict[str, int]:
        marks = (THINK, END_THINK, CALL, END_CALL, JSON_CALLS, END_JSON_CALLS)
        ids = {mark: mark_ids(self._tokenizer, mark) for mark in marks}
        return {mark: found[0] for mark, found in ids.items() if len(found) == 1}

    @cached_property
    def _thought_marks(self) -> ThoughtMarks:
        newlines = (self._tokenizer.encode(text, add_special_tokens=False) for text in ("\n", "\n\n"))
        return ThoughtMarks(
            mark=END_THINK.encode(),
            end_id=self._mark_ids.get(END_THINK),
            token_bytes=self._tokenizer.token_bytes,
            num_tokens=self._tokenizer.vocab_size,
            end_ids=tuple(end_of_thought_ids(self._tokenizer)),
            gap_ids=tuple(ids[0] for ids in newlines if len(ids) == 1),
            eos_ids=self._eos_ids,
        )

    def _begins_in_thought(self, prompt_ids: Sequence[int]) -> bool:
        """As `thinking_is_open`, for ids."""
        ids = self._mark_ids
        if THINK in ids and END_THINK in ids:
            last = next((i for i in reversed(prompt_ids) if i in (ids[THINK], ids[END_THINK])), None)
            return last == ids[THINK]
        return thinking_is_open(self._tokenizer.decode(prompt_ids[-_TAIL:], skip_special_tokens=False))


class GrammarConstraint:
    """A matcher of llguidance, which is this constraint's own, as a constraint."""

    def __init__(self, matcher: Any, eos_ids: tuple[int, ...]) -> None:
        self._matcher, self._eos_ids = matcher, eos_ids
        self.num_accepted = 0

    @property
    def is_finished(self) -> bool:
        return bool(self._matcher.is_stopped())

    def accept(self, token_id: int) -> None:
        self.num_accepted += 1
        if not (self.is_finished and token_id in self._eos_ids):
            self._matcher.consume_token(token_id)
        self._check()

    def fill(self, mask: Tensor) -> bool:
        self._matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.numel() * mask.element_size())
        self._check()
        return True

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError("the structure cannot be followed further", found=_first_line(self._matcher.get_error()))


def _first_line(text: str) -> str:
    return " ".join(text.partition("<state>")[0].split())[:300]


def _key(spec: StructuredSpec) -> str:
    """All of a spec as one text. Raises: RequestError for what is not JSON."""
    fields = [getattr(spec, field.name) for field in dataclasses.fields(spec)]
    try:
        return json.dumps(fields, default=_plain)
    except (RecursionError, TypeError, ValueError) as error:
        raise RequestError("not JSON, or nested too deeply", found=str(error)[:100], where="structured") from error


def _plain(value: object) -> object:
    """What JSON has no form for: read-only mappings."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"not JSON: {type(value).__name__}")
