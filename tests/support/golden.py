"""The verdict on a run against what vLLM 0.25.0 answered on an H200, and the figures behind it.

The goldens hold, per prompt, vLLM's 48 greedy tokens and its five best (id, log-probability) at each of their
positions, once as decoding saw them and once with the whole sequence given as a prompt. vLLM does not agree with itself
to the last token, so the verdict is measured in its own noise. The engine is teacher-forced on the golden's tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hemiola import LLM, SamplingParams

_FOLDER = Path(__file__).parents[1] / "data" / "golden"
SCHEMES = ("bf16", "fp8", "nvfp4", "lightning")
MODES = ("decode", "prefill")


def read_golden(scheme: str) -> tuple[dict[str, Any], dict[str, float]]:
    """What vLLM answered for a scheme's seeded checkpoint, and its own noise."""
    golden = json.loads((_FOLDER / f"golden-{scheme}.json").read_text())
    return golden, golden["self_noise_decode_vs_prefill"]


@dataclass(frozen=True)
class Figures:
    """differences: |log-probability difference| of the oracle's top five; margins: the oracle's own margin at each
    position whose best token differs."""

    differences: torch.Tensor
    margins: list[float]
    num_positions: int

    def verdict(self, noise: dict[str, float]) -> dict[str, bool]:
        return {
            "mean": self.differences.mean().item() <= 1.3 * noise["mean_abs_dlogp"],
            "share": len(self.margins) / self.num_positions <= 2 * noise["argmax_differs"],
            "margin": self.num_wide(noise) * 500 <= self.num_positions,
        }

    def num_wide(self, noise: dict[str, float]) -> int:
        """Positions wider than the oracle's widest plus 1/8. Margins come in steps of 1/16, quoted in decimals."""
        return sum(margin > noise["widest_margin_of_a_differing_argmax"] + 1 / 8 + 1e-4 for margin in self.margins)

    def describe(self, noise: dict[str, float]) -> str:
        d, n, widest = self.differences, self.num_positions, sorted(self.margins)[:-6:-1]
        return (
            f"mean {d.mean():.4f} (at most {1.3 * noise['mean_abs_dlogp']:.4f}), 99th percentile "
            f"{d.quantile(0.99):.3f}; best token differs at {len(self.margins)} of {n} = {len(self.margins) / n:.2%} "
            f"(at most {2 * noise['argmax_differs']:.2%}), widest margins {[round(m, 3) for m in widest]}, "
            f"{self.num_wide(noise)} above {noise['widest_margin_of_a_differing_argmax'] + 1 / 8} (at most {n // 500})"
        )


def compare(
    rows: list[list[tuple[int, float]]], golden_rows: list[list[list[float]]]
) -> tuple[list[float], list[float]]:
    """Per position: our whole distribution, best first, against the oracle's five best."""
    differences, margins = [], []
    for row, golden in zip(rows, golden_rows, strict=True):
        ours, oracle = dict(row), {int(token): value for token, value in golden}
        differences += [abs(ours[token] - value) for token, value in oracle.items()]
        best, oracle_best = row[0][0], int(golden[0][0])
        if best != oracle_best:
            margins.append(golden[0][1] - oracle.get(best, min(oracle.values())))
    return differences, margins


def run(llm: LLM, golden: dict[str, Any], mode: str) -> Figures:
    items = golden["items"]
    if mode == "decode":
        prompts = [item["prompt_ids"] for item in items]
        forced = [
            SamplingParams(max_tokens=48, ignore_eos=True, logprobs=-1, forced_output_ids=item["output_ids"])
            for item in items
        ]
        rows = [output.outputs[0].logprobs for output in llm.generate(prompts, forced)]
    else:
        prompts = [item["prompt_ids"] + item["output_ids"] for item in items]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=-1))
        rows = [output.prompt_logprobs[-48:] for output in outputs]
    differences: list[float] = []
    margins: list[float] = []
    for own, item in zip(rows, items, strict=True):
        more = compare(own, item[f"{mode}_top"])
        differences += more[0]
        margins += more[1]
    return Figures(torch.tensor(differences), margins, 48 * len(items))
