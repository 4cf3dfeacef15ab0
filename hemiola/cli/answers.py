"""How answers are written: a line of JSON each, text as it appears, or text when all is done; and the figures."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from hemiola.config.sampling import SamplingParams
    from hemiola.front import Prompt
    from hemiola.llm import LLM, CompletionOutput, RequestOutput

# On a terminal, control characters in a model's text are shown as their pictures (U+2400 and on), not obeyed.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_PICTURES |= {code: 0xFFFD for code in range(0x80, 0xA0)}


def write_json(outputs: Iterable[RequestOutput]) -> None:
    """One JSON object per choice and line on stdout, ASCII, in order."""
    for output in outputs:
        for choice in output.outputs:
            line = _json_object(output, choice) | ({"choice": choice.index} if len(output.outputs) > 1 else {})
            sys.stdout.write(json.dumps(line, allow_nan=False) + "\n")


def _json_object(output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
    return {
        "prompt_ids": output.prompt_token_ids,
        "output_ids": choice.token_ids,
        "text": choice.text,
        "finish_reason": choice.finish_reason,
        "logprobs": _finite(choice.logprobs),
        "prompt_logprobs": _finite(output.prompt_logprobs),
    }


def _finite(positions: Sequence[Sequence[tuple[int, float]] | None] | None) -> list[list[Any] | None] | None:
    """Log-probabilities as JSON can hold them: -inf and NaN, for which it has no numbers, become null."""
    if positions is None:
        return None
    return [
        None if position is None else [[token, value if math.isfinite(value) else None] for token, value in position]
        for position in positions
    ]


def stream_answer(llm: LLM, prompt: Prompt, params: SamplingParams, shown_prompt: str | None) -> str:
    """Write one answer as it appears; returns its figures. shown_prompt: what a terminal shows before it, dim."""
    _write_prompt(shown_prompt)
    has_text = llm.loaded.tokenizer is not None
    num_prompt, num_output = 0, 0
    start = first = last = time.perf_counter()
    for delta in llm.stream(prompt, params):
        last = time.perf_counter()
        first = last if num_output == 0 else first
        num_prompt, num_output = len(delta.answer.prompt_ids), num_output + len(delta.new_ids)
        _write_text(delta.text if has_text else "".join(f"{token} " for token in delta.new_ids))
    _write_text("\n")
    prefill = f"{num_prompt} prompt tokens, {_rate(num_prompt, first - start)} prefill (over time to first token)"
    after = f"{num_output - 1} after the first, {_rate(num_output - 1, last - first)} decode"
    return f"{prefill}; {num_output} tokens, {after}"


def write_answers(llm: LLM, outputs: Sequence[RequestOutput], shown_prompts: Sequence[str | None]) -> None:
    """Write finished answers, in order, an empty line between them where a terminal shows their prompts."""
    for index, (output, prompt) in enumerate(zip(outputs, shown_prompts, strict=True)):
        for choice in output.outputs:
            if sys.stdout.isatty() and (index or choice.index):
                _write_text("\n")
            _write_prompt(prompt)
            _write_text(choice.text if llm.loaded.tokenizer else " ".join(map(str, choice.token_ids)))
            _write_text("\n")


def batch_figures(outputs: Sequence[RequestOutput], seconds: float) -> str:
    """Figures of prompts that ran together: everything over the whole time, prefill and decode not told apart."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    prompts = "1 prompt" if len(outputs) == 1 else f"{len(outputs)} prompts together"
    rate = f"{_rate(num_output, seconds)} over the whole time, prefill included"
    return f"{prompts}, {num_prompt} prompt tokens; {num_output} tokens, {rate}"


def run_figures(llm: LLM) -> str:
    """Numeric mode, and the arms that ran, from the engine's counters."""
    calls: Counter[str] = Counter()
    ops: defaultdict[str, set[str]] = defaultdict(set)
    for path, count in llm.path_counts().items():
        arm = f"{path.arm} arm" + (f" ({path.reason})" if path.reason else "")
        calls[arm] += count
        ops[arm].add(path.op)
    arms = [f"{arm}: {len(ops[arm])} ops, {count:,} calls" for arm, count in calls.items()]
    return "; ".join([str(llm.loaded.engine.model.dtype).removeprefix("torch."), *arms])


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:.1f} tokens/s" if count > 0 and seconds > 0 else "no rate"


def _write_prompt(text: str | None) -> None:
    if text is not None and sys.stdout.isatty():
        typer.secho(text.translate(_PICTURES), dim=True, nl=False)


def _write_text(text: str) -> None:
    sys.stdout.write(text.translate(_PICTURES) if sys.stdout.isatty() else text)
    sys.stdout.flush()
