"""Oracles' answers for the seeded checkpoints, and a run's figures against them.

The goldens hold, per prompt, 48 greedy tokens and the five best (id, log-probability) at each of their positions, once
as decoding saw them and once with the whole sequence given as a prompt. Those of SCHEMES are vLLM 0.25.0's, taken on an
H200; that of WIDE is of transformers, in bf16 on a CPU (`hemiola golden --oracle transformers --dtype bf16`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hemiola import LLM
from hemiola.evidence import MODES, Figures, Golden, Mode, Noise, measure
from tests.support.seeded_checkpoint import SCHEMES, WIDE

FOLDER = Path(__file__).parents[1] / "data" / "golden"
__all__ = ["FOLDER", "MODES", "SCHEMES", "WIDE", "read_golden", "run"]


def read_golden(scheme: str) -> tuple[dict[str, Any], Noise]:
    """What the oracle answered for a scheme's seeded checkpoint, as the file has it, and its own noise."""
    golden = json.loads((FOLDER / f"golden-{scheme}.json").read_text())
    return golden, Noise(**golden["self_noise_decode_vs_prefill"])


def run(llm: LLM, golden: dict[str, Any], mode: Mode) -> Figures:
    """Teacher-forced alone."""
    return measure(llm, Golden.from_json(golden).items, mode, runs_free=False)
