"""hemiola against transformers on this machine's CPU, and the shipped model's speed: `python -m benchmarks.cpu`.

Same machine, same process, same threads, same float32 checkpoint on disk, same prompts; repeats alternate between the
two, and a figure is printed only where all tokens of all repeats are equal. Of hemiola the whole path is timed
(scheduling, model, sampling), of transformers the bare forward with its cache and an argmax, which is faster than its
`generate`. Prefix caching is off: the prompts repeat, and a hit would be no prefill. A table for people goes to stderr,
one JSON document to stdout; exit status 1 when tokens differ.

Prefill is one prompt up to its first token. Decode is the steps after the first token alone, a repeat's figure being
the median of them.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from benchmarks.machine import conditions
from hemiola import LLM, SamplingParams
from hemiola.errors import CheckpointError
from hemiola.loading import shipped_model
from tests.support import oracle

REPEATS = 9
PATTERN = "MEM*EM-MEM*E"
# Sizes of two checkpoints: one whose time is the engine's own, one whose weights (44 MB) have to come from memory.
_TINY = {
    "hidden_size": 128, "vocab_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 32, "chunk_size": 64,
    "intermediate_size": 256, "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 128,
}  # fmt: skip
_SMALL = {
    "hidden_size": 256, "vocab_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "mamba_num_heads": 16, "mamba_head_dim": 32, "n_groups": 4, "ssm_state_size": 64, "chunk_size": 64,
    "intermediate_size": 512, "n_routed_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 256,
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """Seconds to the first token, seconds of each later step, and the ids, prompt by prompt."""

    first_s: float
    steps_s: list[float]
    ids: list[list[int]]


@dataclass(frozen=True)
class Case:
    """What is measured. num_tokens: new ones per prompt; a case of one new token measures prefill."""

    name: str
    batch: int
    prompt_length: int
    num_tokens: int

    @property
    def unit(self) -> str:
        return "ms to first token" if self.num_tokens == 1 else "ms per step"

    def figure(self, run: Run) -> float:
        return 1000 * (run.first_s if self.num_tokens == 1 else statistics.median(run.steps_s))


CASES = (Case("prefill, 512 tokens", 1, 512, 1), Case("decode, batch 1", 1, 64, 65), Case("decode, batch 8", 8, 64, 33))


def run_hemiola(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int) -> Run:
    """All prompts at once through the whole engine, greedy."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    start = time.perf_counter()
    answers = [llm.front.add(list(prompt), params) for prompt in prompts]
    llm.front.step()
    times = [time.perf_counter()]
    while llm.front.has_unfinished:
        llm.front.step()
        times.append(time.perf_counter())
    steps = [after - before for before, after in pairwise(times)]
    return Run(times[0] - start, steps, [answer.choices[0].request.output_ids for answer in answers])


@torch.inference_mode()
def run_transformers(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> Run:
    """The same with transformers' forward and cache; logits of the last position only."""
    start = time.perf_counter()
    out = model(input_ids=torch.tensor(prompts), use_cache=True, logits_to_keep=1)
    columns = [out.logits[:, -1].argmax(-1)]
    times = [time.perf_counter()]
    while len(columns) < num_tokens:
        out = model(input_ids=columns[-1][:, None], cache=out.cache, use_cache=True, logits_to_keep=1)
        columns.append(out.logits[:, -1].argmax(-1))
        times.append(time.perf_counter())
    steps = [after - before for before, after in pairwise(times)]
    return Run(times[0] - start, steps, torch.stack(columns, 1).tolist())


def spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def compare(case: Case, llm: LLM, model: Any, vocab_size: int) -> dict[str, Any]:
    """One case, alternating; the first run of each warms up and counts for the tokens only.

    Raises: SystemExit when a token differs.
    """
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, vocab_size, (case.batch, case.prompt_length), generator=generator).tolist()
    runners: dict[str, Callable[[], Run]] = {
        "hemiola": lambda: run_hemiola(llm, prompts, case.num_tokens),
        "transformers": lambda: run_transformers(model, prompts, case.num_tokens),
    }
    figures: dict[str, list[float]] = {name: [] for name in runners}
    expected = runners["transformers"]().ids
    for repeat in range(REPEATS + 1):
        for name in sorted(runners, reverse=repeat % 2 == 1):
            run = runners[name]()
            if run.ids != expected:
                sys.exit(f"{case.name}: the tokens of {name} differ in repeat {repeat}; no figure is printed")
            if repeat:
                figures[name].append(case.figure(run))
    ratio = statistics.median(figures["transformers"]) / statistics.median(figures["hemiola"])
    sides = {name: spread(values) for name, values in figures.items()}
    return {"case": case.name, "unit": case.unit, **sides, "transformers_over_hemiola": ratio}


def compare_all(name: str, sizes: dict[str, Any]) -> dict[str, Any]:
    config = oracle.config(PATTERN, **sizes)
    model = oracle.build(config)
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(oracle.save(model, Path(folder)), dtype="float32", cache_bytes=1 << 28, prefix_caching=False)
        results = [compare(case, llm, model, config.vocab_size) for case in CASES]
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    return {"checkpoint": name, "pattern": PATTERN, "sizes": sizes, "weight_bytes": num_bytes, "results": results}


def measure_shipped(dtype: str) -> dict[str, Any]:
    """Decode at batch 1 of the model that comes with hemiola; tokens per second of the decode window."""
    llm = LLM(dtype=dtype)
    prompt = llm.front.encode("It was a fine morning, and")
    runs = [run_hemiola(llm, [prompt], 129) for _ in range(REPEATS + 1)][1:]
    rates = [len(run.steps_s) / sum(run.steps_s) for run in runs]
    return {"dtype": dtype, "case": "decode, batch 1", "unit": "tokens per second", "hemiola": spread(rates)}


def shipped() -> list[dict[str, Any]]:
    try:
        shipped_model()
    except CheckpointError:
        return []
    return [measure_shipped("auto"), measure_shipped("float32")]


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    document: dict[str, Any] = {"benchmark": "cpu", "conditions": conditions()}
    document["conditions"] |= {"transformers": transformers.__version__, "repeats": REPEATS}
    document["comparison"] = [compare_all("tiny", _TINY), compare_all("small", _SMALL)]
    document["shipped"] = shipped()
    Console(stderr=True, width=None if sys.stderr.isatty() else 140).print(table(document))
    print(json.dumps(document))


def table(document: dict[str, Any]) -> Table:
    c = document["conditions"]
    title = (
        f"{c['cpu']}, {c['threads']} threads, torch {c['torch']}, transformers {c['transformers']}, n = {c['repeats']}"
    )
    result = Table("checkpoint", "case", "unit", "hemiola", "transformers", "ratio", title=title, title_justify="left")
    for group in document["comparison"]:
        for row in group["results"]:
            sides = (f"{row[s]['median']:.2f} ({row[s]['min']:.2f} .. {row[s]['max']:.2f})" for s in _SIDES)
            result.add_row(
                group["checkpoint"], row["case"], row["unit"], *sides, f"{row['transformers_over_hemiola']:.2f}"
            )
    for row in document["shipped"]:
        side = f"{row['hemiola']['median']:.1f} ({row['hemiola']['min']:.1f} .. {row['hemiola']['max']:.1f})"
        result.add_row(f"shipped, {row['dtype']}", row["case"], row["unit"], side, "", "")
    return result


_SIDES = ("hemiola", "transformers")

if __name__ == "__main__":
    main()
