"""LLM: the offline Python API. Text or token ids in, finished answers out; shapes and names follow vLLM's `LLM`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hemiola.config.engine import EngineConfig
from hemiola.config.sampling import SamplingParams
from hemiola.engine.request import TokenLogprobs
from hemiola.errors import ConfigError, RequestError
from hemiola.front import Answer, Choice, Delta, Front, Prompt
from hemiola.loading import load
from hemiola.ops import Path as OpPath
from hemiola.text.chat import Message


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice. logprobs: per output token, (id, log-probability) best first; None when not asked for.

    finish_reason: "stop" (eos, a stop id or a stop string), "length", "abort" or "error". stop_reason: the stop id or
    string. error: what failed, when this choice alone did.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished prompt. prompt_logprobs: per prompt token, None for the first; None when not asked for.

    num_cached_tokens: prompt tokens that its first choice did not have to compute.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int | None = None


class LLM:
    """A model ready to generate.

    model: a checkpoint folder, a hub id, or None for the small model that comes with the package.
    settings: fields of EngineConfig (dtype, max_num_seqs, ...).
    Raises: ConfigError, CheckpointError, CapacityError; see `hemiola.loading.load`.
    """

    def __init__(self, model: str | Path | None = None, *, revision: str | None = None, **settings: Any) -> None:
        known = {f.name for f in fields(EngineConfig)}
        for name in settings:
            if name not in known:
                raise ConfigError("unknown setting", found=name, expected=f"one of {', '.join(sorted(known))}")
        self.loaded = load(model, EngineConfig(**settings), revision=revision)
        self.front = Front(self.loaded.engine, self.loaded.tokenizer)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Finished answers, in the order of the prompts; all of them run together.

        prompts: one text or list of token ids, or a list of these. sampling_params: for all, or one per prompt;
        None is SamplingParams(), greedy. A bar shows progress on a terminal.
        Raises: RequestError or CapacityError before anything runs, when any prompt or parameter is unusable.
        """
        answers = self._submit(_as_list(prompts), sampling_params)
        self._finish(answers)
        return [to_output(answer) for answer in answers]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[Delta]:
        """Pieces of one prompt's answer as they appear, also when somebody else makes the engine step in between.

        Leaving the loop early withdraws the request.
        """
        (answer,) = self._submit([prompt], sampling_params)
        shown = [(0, 0) for _ in answer.choices]  # characters and ids
        finished = False
        try:
            while not finished:
                if not answer.finished:
                    self.front.step()
                finished = answer.finished
                for choice in answer.choices:
                    num_characters, num_ids = shown[choice.index]
                    text, new_ids = choice.text[num_characters:], choice.request.output_ids[num_ids:]
                    shown[choice.index] = (num_characters + len(text), num_ids + len(new_ids))
                    if text or new_ids:
                        yield Delta(answer, choice, text, new_ids)
        finally:
            self.front.abort(answer)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_switches: object,
    ) -> list[RequestOutput]:
        """Answer one conversation, rendered by the checkpoint's own chat template.

        template_switches: what the template reads beyond the standard names (enable_thinking, ...).
        Raises: RequestError when there is no template, it refuses, or it does not know a switch.
        """
        tokenizer = self.loaded.tokenizer
        if tokenizer is None:
            raise RequestError("chat needs a tokenizer, and this model has none")
        text = tokenizer.apply_chat_template(messages, tools, add_generation_prompt, **template_switches)
        answers = self._submit([text], sampling_params, add_special_tokens=False)
        self._finish(answers)
        return [to_output(answer) for answer in answers]

    def path_counts(self) -> dict[OpPath, int]:
        """How often each (op, arm, variant, reason) ran in this engine so far."""
        return self.loaded.engine.model.ops.snapshot()

    def _submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        add_special_tokens: bool = True,
    ) -> list[Answer]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(
                "as many sampling_params as prompts are needed", found=len(params), expected=len(prompts)
            )
        answers: list[Answer] = []
        try:
            for prompt, own in zip(prompts, params, strict=True):
                answers.append(self.front.add(prompt, own, add_special_tokens=add_special_tokens))
        except BaseException:
            self._withdraw(answers)
            raise
        return answers

    def _finish(self, answers: Sequence[Answer]) -> None:
        """Run until all are finished; withdraw what is left when interrupted."""
        columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        try:
            with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
                task = progress.add_task("", total=sum(len(answer.choices) for answer in answers))
                while not all(answer.finished for answer in answers):
                    self.front.step()
                    done = sum(choice.finished for answer in answers for choice in answer.choices)
                    progress.update(task, completed=done)
        finally:
            self._withdraw(answers)

    def _withdraw(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            if not answer.finished:
                self.front.abort(answer)


def to_output(answer: Answer) -> RequestOutput:
    """The public view of an answer."""
    first = answer.choices[0].request
    return RequestOutput(
        request_id=answer.request_id,
        prompt=answer.prompt,
        prompt_token_ids=answer.prompt_ids,
        prompt_logprobs=first.prompt_logprobs if first.params.prompt_logprobs is not None else None,
        outputs=[_completion(choice) for choice in answer.choices],
        num_cached_tokens=first.num_cached_tokens,
    )


def _completion(choice: Choice) -> CompletionOutput:
    request = choice.request
    return CompletionOutput(
        index=choice.index,
        text=choice.text,
        token_ids=request.output_ids,
        logprobs=request.logprobs if request.params.logprobs is not None else None,
        finish_reason=request.finish_reason.value if request.finish_reason else None,
        stop_reason=request.stop_reason,
        error=str(request.error) if request.error else None,
    )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a text, or a list whose first element is a number, is one."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and not isinstance(items[0], str | Sequence):
        return [items]  # type: ignore[list-item]  # ids of one prompt
    return items  # type: ignore[return-value]
