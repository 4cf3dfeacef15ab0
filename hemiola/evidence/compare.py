"""An engine against a golden, position by position, and the same comparison as an oracle's own noise.

The engine is teacher-forced on the golden's tokens, so that one fork neither hides nor voids what comes after it. In
decoding, it also runs by itself, as it does for everybody: up to its first fork, that run's tokens count, too. An
engine with prefix caching reuses in the second run what the first has computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch

from hemiola.config.sampling import WHOLE_VOCABULARY, SamplingParams
from hemiola.engine.request import TokenLogprobs
from hemiola.evidence.golden import EvidenceError, GoldenItem, Noise
from hemiola.llm import LLM, RequestOutput

Mode = Literal["decode", "prefill"]
MODES: tuple[Mode, ...] = get_args(Mode)

MEAN_FACTOR = 1.3  # of the oracle's mean log-probability difference
SHARE_FACTOR = 2.0  # of its share of differing best tokens
MARGIN_ABOVE = 1 / 8  # nats beyond its widest margin; the margins of bf16 logits come in steps of 1/16
WIDE_ONE_IN = 500  # positions of which one may be wider than that
_QUOTED = 1e-4  # what a margin may lose by being written in decimals

# Alternatives asked for per position. A golden's token that is not among them is asked for with the whole vocabulary.
_ALTERNATIVES = 256


@dataclass(frozen=True, slots=True)
class Fork:
    """A position whose best token differs. margin: the oracle's own log-probability of its best token less that of the
    engine's, or of the last that it lists where that is not among them (is_at_least)."""

    position: int
    token: int
    oracle_token: int
    margin: float
    is_at_least: bool


@dataclass(frozen=True, slots=True)
class PromptFigures:
    """differences: |log-probability difference| of every token that the oracle lists, over all positions."""

    num_positions: int
    differences: Sequence[float]
    forks: Sequence[Fork]

    @property
    def num_matches(self) -> int:
        return self.num_positions - len(self.forks)


@dataclass(frozen=True)
class Figures:
    """The figures of all prompts, in the golden's order."""

    prompts: Sequence[PromptFigures]

    @cached_property
    def differences(self) -> torch.Tensor:
        return torch.tensor([value for prompt in self.prompts for value in prompt.differences], dtype=torch.float64)

    @property
    def mean(self) -> float:
        return self.differences.mean().item()

    @property
    def percentile_99(self) -> float:
        return self.differences.quantile(0.99).item()

    @property
    def margins(self) -> list[float]:
        """Of all forks, widest first."""
        return sorted((fork.margin for prompt in self.prompts for fork in prompt.forks), reverse=True)

    @property
    def num_positions(self) -> int:
        return sum(prompt.num_positions for prompt in self.prompts)

    @property
    def num_matches(self) -> int:
        return sum(prompt.num_matches for prompt in self.prompts)

    @property
    def share(self) -> float:
        return (self.num_positions - self.num_matches) / self.num_positions

    def num_wide(self, noise: Noise) -> int:
        return sum(is_wide(margin, noise) for margin in self.margins)

    def verdict(self, noise: Noise) -> dict[str, bool]:
        """Which figures are inside the oracle's own noise, by the stated factors."""
        return {
            "mean": self.mean <= MEAN_FACTOR * noise.mean_abs_dlogp,
            "share": self.num_positions - self.num_matches <= SHARE_FACTOR * noise.argmax_differs * self.num_positions,
            "margin": self.num_wide(noise) * WIDE_ONE_IN <= self.num_positions,
        }

    def describe(self, noise: Noise) -> str:
        """Every figure with its limit and the factor that the limit comes from."""
        count, widest = self.num_positions, [round(margin, 3) for margin in self.margins[:5]]
        return (
            f"mean {self.mean:.4f} (at most {MEAN_FACTOR:g} x {noise.mean_abs_dlogp:.4f} = "
            f"{MEAN_FACTOR * noise.mean_abs_dlogp:.4f}), 99th percentile {self.percentile_99:.3f}; "
            f"best token differs at {count - self.num_matches} of {count} = {self.share:.2%} "
            f"(at most {SHARE_FACTOR:g} x {noise.argmax_differs:.2%} = {SHARE_FACTOR * noise.argmax_differs:.2%}); "
            f"widest margins {widest}, {self.num_wide(noise)} above {noise.widest_margin_of_a_differing_argmax:g} + "
            f"{MARGIN_ABOVE:g} (at most 1 in {WIDE_ONE_IN} = {count // WIDE_ONE_IN})"
        )


def is_wide(margin: float, noise: Noise) -> bool:
    """Whether a fork is none of the near ties that the oracle's own noise explains."""
    return not margin <= noise.widest_margin_of_a_differing_argmax + MARGIN_ABOVE + _QUOTED


def compare(
    rows: Sequence[TokenLogprobs], golden_rows: Sequence[TokenLogprobs], tokens: Sequence[int] = ()
) -> PromptFigures:
    """One prompt. rows: per position log-probabilities, best first; a token of golden_rows that they lack is passed
    over. tokens: what the engine chose by itself, position by position, as far as that counts."""
    differences: list[float] = []
    forks: list[Fork] = []
    for position, (row, golden_row) in enumerate(zip(rows, golden_rows, strict=True)):
        ours, oracle = dict(row), dict(golden_row)
        differences += [abs(ours[token] - value) for token, value in oracle.items() if token in ours]
        best, oracle_best = row[0][0], golden_row[0][0]
        token = best if position >= len(tokens) or tokens[position] == oracle_best else tokens[position]
        if token != oracle_best:
            margin = golden_row[0][1] - oracle.get(token, min(oracle.values()))
            forks.append(Fork(position, token, oracle_best, margin, token not in oracle))
    return PromptFigures(len(rows), differences, forks)


def self_noise(items: Sequence[GoldenItem], prefill: Sequence[Sequence[TokenLogprobs]]) -> Noise:
    """An oracle's decode against its prefill; prefill: per prompt and position, as many alternatives as there are. A
    token that is not among them is passed over, which can only make the noise smaller, and the gate stricter.

    items: with their decode_top, and at least one position.
    """
    tops = [item.decode_top or () for item in items]
    figures = Figures([compare(rows, top) for rows, top in zip(prefill, tops, strict=True)])
    return Noise(
        mean_abs_dlogp=figures.mean,
        p99_abs_dlogp=figures.percentile_99,
        argmax_differs=figures.share,
        widest_margin_of_a_differing_argmax=max(figures.margins, default=0.0),
        positions=figures.num_positions,
    )


def measure(llm: LLM, items: Sequence[GoldenItem], mode: Mode, *, runs_free: bool = True) -> Figures:
    """Run all prompts together, teacher-forced, and compare. runs_free: in decoding, run them by themselves, too.

    Raises: EvidenceError when the golden lacks what the mode needs, no position is compared, or the engine does not
    give every log-probability that the golden lists.
    """
    golden_rows = [item.decode_top if mode == "decode" else item.prefill_top for item in items]
    if any(rows is None for rows in golden_rows):
        raise EvidenceError("a missing term", found=f"prompts without {mode}_top", where="golden")
    if not items or not all(item.output_ids for item in items):
        empty = sum(not item.output_ids for item in items)
        raise EvidenceError(
            "zero tokens to compare", found=f"{len(items)} prompts, {empty} without output ids", where="golden"
        )
    rows = forced_rows(llm, items, mode, _ALTERNATIVES)
    incomplete = [index for index in range(len(items)) if _lacks(rows[index], golden_rows[index] or ())]
    whole = forced_rows(llm, [items[index] for index in incomplete], mode, WHOLE_VOCABULARY)
    for index, own in zip(incomplete, whole, strict=True):
        if _lacks(own, golden_rows[index] or ()):
            raise EvidenceError(
                "a missing term", found="a golden's token without a log-probability", where=f"prompt {index}, {mode}"
            )
        rows[index] = own
    tokens = free_tokens(llm, items) if mode == "decode" and runs_free else [()] * len(items)
    return Figures([compare(o, g or (), t) for o, g, t in zip(rows, golden_rows, tokens, strict=True)])


def _lacks(rows: Sequence[TokenLogprobs], golden_rows: Sequence[TokenLogprobs]) -> bool:
    return any(not dict(top).keys() <= dict(row).keys() for row, top in zip(rows, golden_rows, strict=True))


def free_tokens(llm: LLM, items: Sequence[GoldenItem]) -> list[Sequence[int]]:
    """What the engine generates by itself, as far as it counts: up to the first fork, which is in it."""
    params = [SamplingParams(max_tokens=len(item.output_ids), ignore_eos=True) for item in items]
    outputs = llm.generate([item.prompt_ids for item in items], params)
    result: list[Sequence[int]] = []
    for item, output in zip(items, outputs, strict=True):
        own = _finished(output, len(item.output_ids)).outputs[0].token_ids
        pairs = enumerate(zip(own, item.output_ids, strict=True), start=1)
        result.append(own[: next((end for end, (token, theirs) in pairs if token != theirs), len(own))])
    return result


def forced_rows(llm: LLM, items: Sequence[GoldenItem], mode: Mode, k: int) -> list[list[TokenLogprobs]]:
    """Per prompt and output position the k best log-probabilities, the outputs forced; k: -1 is the vocabulary."""
    if not items:
        return []
    k = min(k, llm.loaded.config.vocab_size)
    if mode == "decode":
        params = [
            SamplingParams(
                max_tokens=len(item.output_ids), ignore_eos=True, logprobs=k, forced_output_ids=item.output_ids
            )
            for item in items
        ]
        outputs = llm.generate([item.prompt_ids for item in items], params)
        return [
            _finished(output, len(i.output_ids)).outputs[0].logprobs or []
            for i, output in zip(items, outputs, strict=True)
        ]
    ends = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=k)
    outputs = llm.generate([[*item.prompt_ids, *item.output_ids] for item in items], ends)
    result = []
    for item, output in zip(items, outputs, strict=True):
        rows = _finished(output, 1).prompt_logprobs or []
        result.append([row for row in rows[len(item.prompt_ids) :] if row is not None])
    return result


def _finished(output: RequestOutput, num_tokens: int) -> RequestOutput:
    """Raises: EvidenceError when a request did not run to its end."""
    choice = output.outputs[0]
    if choice.error is not None or len(choice.token_ids) != num_tokens:
        raise EvidenceError(
            "a request did not run to its end",
            found=choice.error or f"{len(choice.token_ids)} tokens",
            expected=f"{num_tokens} tokens",
            where=output.request_id,
        )
    return output
