"""Cells of a benchmark, and their measurement: decode steps and prefill, through Engine.step alone."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from hemiola.bench.window import WindowError
from hemiola.config.sampling import SamplingParams
from hemiola.engine.engine import Engine
from hemiola.engine.request import FinishReason, Request
from hemiola.errors import ConfigError

PROMPT_TOKENS = 128  # of a decode cell that names none
SHORT_OUTPUT = 16
SEED = 1  # of the prompts


@dataclass(frozen=True, slots=True)
class Cell:
    """`batch` prompts of `prompt_tokens` that run together; `steps`: decode steps between the two runs' lengths."""

    kind: Literal["decode", "prefill"]
    batch: int
    prompt_tokens: int
    steps: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind} {self.batch} x {self.prompt_tokens}"

    @property
    def max_output(self) -> int:
        return SHORT_OUTPUT + self.steps if self.kind == "decode" else 1

    @property
    def max_tokens(self) -> int:
        """Of one request, prompt and output."""
        return self.prompt_tokens + self.max_output


def cell(kind: Literal["decode", "prefill"], text: str, steps: int | None = None) -> Cell:
    """The cell of "8" (prompts of PROMPT_TOKENS) or "8x1024". Raises: ConfigError for another form."""
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
    if match is None or not int(match[1]) or match[2] == "0":
        raise ConfigError(
            "no benchmark cell", found=text, expected="BATCH or BATCHxTOKENS, such as 16x1024", where=kind
        )
    batch, prompt = int(match[1]), int(match[2] or PROMPT_TOKENS)
    default = 256 if batch == 1 else 128
    return Cell(kind, batch, prompt, (steps or default) if kind == "decode" else 0)


STANDARD_CELLS = (
    *(cell("decode", text) for text in ("1", "8", "32", "64", "128", "256")),
    *(cell("prefill", text) for text in ("1x8192", "16x1024")),
)
LONG_CELLS = tuple(cell("decode", text) for text in ("1x32768", "32x8192", "64x8192"))


class Run(NamedTuple):
    """From the first arrival: seconds to the last id and to every request's first one, as the host has them."""

    seconds: float
    first_s: float
    requests: list[Request]


class Driver:
    """Runs prompts of random ids through one engine. synchronize: waits for the device."""

    def __init__(self, engine: Engine, synchronize: Callable[[], None], seed: int = SEED) -> None:
        self.engine, self.synchronize = engine, synchronize
        self._generator = torch.Generator().manual_seed(seed)
        self._num_requests = 0

    def prompts(self, batch: int, num_tokens: int) -> list[list[int]]:
        shape = (batch, num_tokens)
        ids: list[list[int]] = torch.randint(3, self.engine.vocab_size, shape, generator=self._generator).tolist()
        return ids

    def add(self, prompts: Sequence[Sequence[int]], num_output: int) -> list[Request]:
        params = SamplingParams(max_tokens=num_output, ignore_eos=True)
        self._num_requests += len(prompts)
        first = self._num_requests
        return [self.engine.add_request(f"bench-{first + i}", ids, params) for i, ids in enumerate(prompts)]

    def run(self, prompts: Sequence[Sequence[int]], num_output: int) -> Run:
        """Raises: what a request ended with."""
        start = time.perf_counter()
        requests = self.add(prompts, num_output)
        while self.engine.has_unfinished and not all(request.output_ids for request in requests):
            self.engine.step()
        first_s = time.perf_counter() - start
        while self.engine.has_unfinished:
            self.engine.step()
        self.synchronize()
        seconds = time.perf_counter() - start
        for request in requests:
            if request.error is not None:
                raise request.error
            assert len(request.output_ids) == num_output, f"{len(request.output_ids)} ids of {num_output}"
        return Run(seconds, first_s, requests)

    def decoding(self, prompts: Sequence[Sequence[int]], num_output: int) -> list[Request]:
        """Requests that have consumed their prompts and are in the middle of their outputs."""
        requests = self.add(prompts, num_output)
        while any(len(request.output_ids) < 2 for request in requests):
            self.engine.step()
        self.synchronize()
        return requests

    def withdraw(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.engine.finish(request.request_id, FinishReason.ABORT)
        while self.engine.has_unfinished:
            self.engine.step()


def measure(driver: Driver, cell: Cell, repeats: int) -> dict[str, Any]:
    """One cell's figures. The first run of each length warms up (compiles, captures) and is reported apart.

    Raises: WindowError where there is nothing to divide.
    """
    return (_measure_decode if cell.kind == "decode" else _measure_prefill)(driver, cell, repeats)


def _measure_decode(driver: Driver, cell: Cell, repeats: int) -> dict[str, Any]:
    """A step is the difference of two runs over the difference of their lengths: prefill and start-up drop out."""
    prompts = driver.prompts(cell.batch, cell.prompt_tokens)
    warm_s = sum(driver.run(prompts, length).seconds for length in (SHORT_OUTPUT, cell.max_output))
    pairs = [(driver.run(prompts, SHORT_OUTPUT), driver.run(prompts, cell.max_output)) for _ in range(repeats)]
    steps_ms = [1000 * (long.seconds - short.seconds) / cell.steps for short, long in pairs]
    first_s = [run.first_s for pair in pairs for run in pair]
    median = statistics.median(steps_ms)
    if min(steps_ms) <= 0:
        raise WindowError(
            "the decode window is negative or empty: the longer run took no longer",
            found=f"{', '.join(f'{ms:.4g}' for ms in steps_ms)} ms per step",
            expected="all > 0",
            where=cell.name,
            remedy="Ask for more --steps.",
        )
    return {
        **_asked(cell),
        "output_tokens": [SHORT_OUTPUT, cell.max_output],
        "ms_per_step": median,
        "tokens_per_s": 1000 * cell.batch / median,
        "samples_ms": steps_ms,
        "first_token_s": statistics.median(first_s),
        "samples_first_token_s": first_s,
        "whole_run_s": statistics.median(long.seconds for _, long in pairs),
        "warm_up_s": warm_s,
        "distinct_last_ids": len({request.output_ids[-1] for request in pairs[-1][1].requests}),
    }


def _measure_prefill(driver: Driver, cell: Cell, repeats: int) -> dict[str, Any]:
    """From arrival to the first id of the last prompt."""
    warm_s = driver.run(driver.prompts(cell.batch, cell.prompt_tokens), 1).seconds
    samples = [driver.run(driver.prompts(cell.batch, cell.prompt_tokens), 1).seconds for _ in range(repeats)]
    median = statistics.median(samples)
    return {
        **_asked(cell),
        "seconds": median,
        "tokens_per_s": cell.batch * cell.prompt_tokens / median,
        "samples_s": samples,
        "warm_up_s": warm_s,
    }


def _asked(cell: Cell) -> dict[str, Any]:
    return {"cell": cell.name, "kind": cell.kind, "batch": cell.batch, "prompt_tokens": cell.prompt_tokens}
