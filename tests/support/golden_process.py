"""A verdict on answers of an oracle, in a process of its own: `python -m tests.support.golden_process SCHEME FOLDER`.

Libraries choose their instructions when they are loaded, and the order of a sum with them: who starts this sets which.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.golden import MODES, read_golden, run

ROOT = Path(__file__).parents[2]
# What every x86 machine of the last ten years has: one with newer instructions computes what the others do.
INSTRUCTIONS = {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


def verdict(scheme: str, folder: Path) -> dict[str, Any]:
    """Of the reference arm, by mode: its figures in words, and each clause; and which arms ran."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, scheme, str(folder)],
        cwd=ROOT,
        env={**os.environ, **INSTRUCTIONS, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def main() -> None:
    from hemiola import LLM

    scheme, folder = sys.argv[1:]
    golden, noise = read_golden(scheme)
    llm = LLM(folder, arms="reference", dtype="bf16", max_num_seqs=24)
    modes = {}
    for mode in MODES:
        figures = run(llm, golden, mode)
        modes[mode] = {"figures": figures.describe(noise), "verdict": figures.verdict(noise)}
    json.dump({"modes": modes, "arms": sorted({path.arm for path in llm.path_counts()})}, sys.stdout)


if __name__ == "__main__":
    main()
