"""Front: where text meets the engine. Turns prompts into requests (one per choice) and steps into text as it appears.

It owns tokenisation, detokenisation and stop strings; the engine below it knows ids only, and what stands above it
(the offline API, the command line, a server) knows neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hemiola.config.sampling import SamplingParams
from hemiola.engine.engine import REQUEST_FAULTS, Engine, StepOutput
from hemiola.engine.request import FinishReason, Request, RequestStatus
from hemiola.errors import RequestError
from hemiola.structured import Grammars
from hemiola.text.output import OutputText
from hemiola.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
_NEEDS_TOKENIZER = {"stop": "stop strings", "structured": "structures", "thinking_budget": "thinking budgets"}


@dataclass(slots=True, eq=False)
class Choice:
    """One of an answer's alternatives. output is None for a model without a tokenizer."""

    index: int
    request: Request
    output: OutputText | None

    @property
    def text(self) -> str:
        return self.output.text if self.output else ""

    @property
    def finished(self) -> bool:
        return self.request.status is RequestStatus.FINISHED


@dataclass(slots=True, eq=False)
class Answer:
    """All choices of one prompt. prompt is None when it came as token ids."""

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    choices: list[Choice] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self.choices)


@dataclass(frozen=True, slots=True)
class Delta:
    """What a step added to one choice; text may be empty while a character or a possible stop string is incomplete."""

    answer: Answer
    choice: Choice
    text: str
    new_ids: list[int]


class Front:
    """grammars: of the model, for structured output and thinking budgets; None without a tokenizer. Its `check`
    compiles a request's grammar ahead of `add`, from any thread."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.grammars = Grammars(tokenizer, engine.vocab_size, engine.eos_token_ids) if tokenizer else None
        self._open: dict[str, tuple[Answer, Choice]] = {}
        self._num_answers = 0

    def add(
        self, prompt: Prompt, params: SamplingParams, *, add_special_tokens: bool = True, priority: int = 0
    ) -> Answer:
        """Queue a prompt; its `n` choices become requests of their own, with seeds of their own.

        add_special_tokens: as in `Tokenizer.encode`, for text prompts. priority: lower runs first.
        Raises: RequestError, CapacityError; then nothing of this prompt stays queued.
        """
        if self.tokenizer is None:
            for name, what in _NEEDS_TOKENIZER.items():
                if getattr(params, name) not in ((), None):
                    raise RequestError(f"{what} need a tokenizer, and this model has none", where=name)
        text = prompt if isinstance(prompt, str) else None
        ids = self.encode(text, add_special_tokens) if text is not None else _checked_ids(prompt)
        answer = Answer(f"request-{self._num_answers}", text, ids)
        try:
            for index in range(params.n):
                name = f"{answer.request_id}.{index}"
                output = OutputText(self.tokenizer, params) if self.tokenizer else None
                constraint = self.grammars.constraint(params, ids) if self.grammars else None
                request = self.engine.add_request(name, ids, _params_of_choice(params, index), priority)
                request.constraint = constraint
                choice = Choice(index, request, output)
                answer.choices.append(choice)
                self._open[name] = (answer, choice)
        except BaseException:
            self.abort(answer)
            raise
        self._num_answers += 1
        return answer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text prompt. Raises: RequestError when the model has no tokenizer."""
        if self.tokenizer is None:
            raise RequestError(
                "a text prompt needs a tokenizer, and this model has none", remedy="Give the prompt as token ids."
            )
        return self.tokenizer.encode(text, add_special_tokens)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._open)

    def step(self) -> list[Delta]:
        """One engine step; what it added, choice by choice, in batch order, to answers that nobody withdrew. A choice
        whose text cannot be made ends with an error."""
        return [self._delta(step) for step in self.engine.step() if step.request.request_id in self._open]

    def abort(self, answer: Answer) -> None:
        """Withdraw what is left of an answer; what it has so far stays readable."""
        for choice in answer.choices:
            self._open.pop(choice.request.request_id, None)
            self.engine.finish(choice.request.request_id, FinishReason.ABORT)

    def _delta(self, step: StepOutput) -> Delta:
        request = step.request
        answer, choice = self._open[request.request_id]
        text, new_ids = "", step.new_ids
        if choice.output is not None:
            try:
                text = self._text(choice, choice.output, step)
            except REQUEST_FAULTS as fault:
                self.engine.fail(request, fault)
            else:
                new_ids = new_ids[: len(new_ids) - self._cut(request, choice.output)]
        if choice.finished:
            del self._open[request.request_id]
        return Delta(answer, choice, text, new_ids)

    @staticmethod
    def _cut(request: Request, output: OutputText) -> int:
        """Drop the ids of a request behind its stop string, of which a step can bring one; how many they were."""
        num_behind = len(request.output_ids) - output.num_tokens
        del request.output_ids[len(request.output_ids) - num_behind :]
        return num_behind

    def _text(self, choice: Choice, output: OutputText, step: StepOutput) -> str:
        """What a step adds to a choice's text; a stop string in it ends the request."""
        request = step.request
        text = output.push(step.new_ids, ends=request.finish_reason is FinishReason.STOP)
        if output.stopped is not None and not step.finished:
            self.engine.finish(request.request_id, FinishReason.STOP, output.stopped)
        elif output.stopped is not None:
            request.finish(FinishReason.STOP, output.stopped)
        return text + output.finish() if choice.finished else text


def _params_of_choice(params: SamplingParams, index: int) -> SamplingParams:
    if params.n == 1:
        return params
    seed = None if params.seed is None else (params.seed + index) % (1 << 63)
    return replace(params, n=1, seed=seed, prompt_logprobs=params.prompt_logprobs if index == 0 else None)


def _checked_ids(prompt: Prompt) -> list[int]:
    ids = list(prompt)
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int):
            raise RequestError(
                "not a token id", found=repr(token), expected="a whole number", where=f"prompt, position {position}"
            )
    return ids  # type: ignore[return-value]  # every element was just checked
