"""Cost model: each term by hand, the file, and the documented example."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hemiola.cache.budget import CachePlan
from hemiola.cache.movements import CopyState, Forget, LoadBlocks, LoadState, SaveBlocks, SaveState
from hemiola.config.engine import EngineConfig
from hemiola.config.sampling import SamplingParams
from hemiola.engine.request import Request
from hemiola.engine.scheduler import ScheduledRow
from hemiola.errors import ConfigError
from hemiola.simulate.cost import CostModel, StepWork, measure, moved_bytes

README = Path(__file__).parents[2] / "hemiola" / "simulate" / "README.md"
PLAN = CachePlan(10, 160, 16, 2, 1000, 0, 0, ())  # 10 bytes of KV per token


def row(num_computed: int, num_tokens: int, marks: tuple[tuple[int, int], ...] = ()) -> ScheduledRow:
    request = Request("a", [1] * 50, SamplingParams(), 0)
    request.num_computed = num_computed
    return ScheduledRow(request, num_tokens, marks)


def test_the_work_of_a_step() -> None:
    rows = [row(40, 1), row(0, 20), row(16, 10, marks=((8, 3),)), row(0, 1)]
    assert measure(rows, PLAN) == StepWork(1, 31, 41 + 20 + 26 + 1, (2 + 1 + 3 + 1) * 1000, 0)


def test_the_bytes_of_copies() -> None:
    assert moved_bytes([CopyState(0, 2), CopyState(2, 1), Forget(5)], PLAN) == (4000, 0)
    assert moved_bytes([SaveState(0, 7), LoadState(7, 1)], PLAN) == (0, 2000)
    assert moved_bytes([SaveBlocks((1, 2, 3), 8), LoadBlocks(8, (4, 5))], PLAN) == (0, 800)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (StepWork(0, 0, 0, 0, 0), 1.0),
        (StepWork(3, 0, 0, 0, 0), 1.75),
        (StepWork(0, 3, 0, 0, 0), 2.5),
        (StepWork(0, 0, 8, 0, 0), 11.0),
        (StepWork(0, 0, 0, 16, 0), 3.0),
        (StepWork(0, 0, 0, 0, 16), 2.0),
        (StepWork(3, 3, 8, 16, 16), 16.25),
    ],
)
def test_each_term(work: StepWork, seconds: float) -> None:
    cost = CostModel(1.0, 0.25, 0.5, device_bytes_per_s=8.0, host_bytes_per_s=16.0)
    assert cost.step_s(work, PLAN) == seconds


def test_what_a_file_leaves_out_is_assumed() -> None:
    config = EngineConfig(prefill_tokens_per_s=500.0, host_bytes_per_s=7.0)
    assert CostModel.read({}, config, "c") == CostModel(0.004, 50e-6, 0.002, 4e12, 7.0)
    assert CostModel.read({"fixed_s": 1, "host_bytes_per_s": 2}, config, "c") == CostModel(1, 50e-6, 0.002, 4e12, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "c: not a supported value; found []"),
        ({"fixed": 1}, "c: unknown key; found fixed; expected fixed_s, decode_row_s"),
        ({"fixed_s": -1}, "c: fixed_s: not a supported value; found -1.0; expected a finite number, 0 or more"),
        ({"fixed_s": "1"}, 'c: fixed_s: not a supported value; found "1"'),
        ({"decode_row_s": float("inf")}, "c: decode_row_s: not a supported value"),
        ({"device_bytes_per_s": 0}, "c: device_bytes_per_s: not a supported value; found 0.0; expected a finite"),
        ({"fixed_s": 0, "prefill_token_s": 0}, "c: steps would take no time"),
        ({"fixed_s": 0, "decode_row_s": 0}, "c: steps would take no time"),
    ],
)
def test_refusals(given: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        CostModel.read(given, EngineConfig(), "c")
    assert str(error.value).startswith(message)


def test_the_examples_are_as_far_from_their_measurements_as_they_say() -> None:
    """README.md: ms per decode step by batch at a context of 128 to 384 tokens, 30B-A3B geometry, bf16 KV."""
    text = README.read_text(encoding="utf-8")
    blocks = re.findall(r"```json\n(\{[^`]*fixed_s[^`]*\})\n```", text)
    plan = CachePlan(1, 16 * 6144, 16, 1, 49_082_368, 0, 0, ())
    figures = r" \| ([\d.]+) \| ([\d.]+) \| ([+-]\d+) %"
    rows = re.findall(rf"^\| (\d+){figures}{figures} \|$", text, re.MULTILINE)
    assert (len(blocks), len(rows)) == (2, 6)
    for index, block in enumerate(blocks):
        cost = CostModel.read(json.loads(block), EngineConfig(), "README.md")
        for batch, *both in rows:
            n, (measured, modelled, error) = int(batch), both[3 * index : 3 * index + 3]
            ms = 1000 * cost.step_s(StepWork(n, 0, 256 * n, 2 * n * plan.slot_bytes, 0), plan)
            assert f"{ms:.2f}" == modelled
            assert f"{100 * (ms / float(measured) - 1):+.0f}" == error
