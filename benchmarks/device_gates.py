"""The seeded checkpoints against oracles' answers for them, `hemiola gate` in a process each: verdicts as JSON.

    PYTHONPATH=. python3 -m benchmarks.device_gates OUT [--run bf16 ...] [--arms device] [--invariant] [--records R]

Run it in the root of the source tree; hemiola need not be installed. All run at once, both modes, 24 prompts each: on
one H200 with 16 cores a minute and a half is expected, most of it Triton's first compilation. Written into OUT:
RUN.json (what `hemiola gate --json` writes), RUN.log (its report), records (for `hemiola bench --record` and
`hemiola report`) and gates.json (verdict, figures, calls by arm and seconds of each, and the conditions), which is
printed, too. Exit status: 0 where all pass, else 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hemiola.bench.machine import versions
from tests.support.golden import FOLDER, SCHEMES, WIDE
from tests.support.seeded_checkpoint import write_seeded_checkpoint


class Run(NamedTuple):
    """A checkpoint, requests that run together, and tokens of a step."""

    scheme: str
    num_seqs: int = 24
    step_tokens: int = 2048


# All 24 prompts together, but bf16's two at a time, so that what is for one or two tokens is gated, too. In small steps
# experts have up to two pairs each, or sixteen, for which FP8 and NVFP4 have kernels of their own on Hopper.
RUNS = {scheme: Run(scheme) for scheme in (*SCHEMES, WIDE)} | {
    "bf16": Run("bf16", num_seqs=2),
    "fp8 in small steps": Run("fp8", num_seqs=8, step_tokens=64),
    "nvfp4 in small steps": Run("nvfp4", step_tokens=64),
}


def gate(name: str, arms: str, invariant: bool, models: Path, out: Path, records: Path) -> dict[str, Any]:
    """Write a run's checkpoint and gate it; without a verdict, `verdict` is None and the log says why."""
    begin, run, file_name = time.perf_counter(), RUNS[name], name.replace(" ", "-")
    model = models / file_name
    write_seeded_checkpoint(model, run.scheme)
    written = time.perf_counter()
    result, log = out / f"{file_name}.json", out / f"{file_name}.log"
    options = ["--arms", arms, "--dtype", "bf16", "--max-num-seqs", str(run.num_seqs), "--json", str(result)]
    options += ["--max-num-batched-tokens", str(run.step_tokens)]
    options += ["--record", str(records), *(["--invariant"] if invariant else [])]
    command = [sys.executable, "-m", "hemiola", "gate", str(model), str(FOLDER / f"golden-{run.scheme}.json")]
    with log.open("w") as file:
        status = subprocess.run([*command, *options], stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    seconds = {"write": round(written - begin, 1), "gate": round(time.perf_counter() - written, 1)}
    if not result.is_file():
        return {"verdict": None, "status": status, "seconds": seconds, "why": log.read_text()[-2000:]}
    document = json.loads(result.read_text())
    calls: dict[str, int] = {"reference": 0, "device": 0}
    for path in document["paths"]:
        calls[path["arm"]] += path["calls"]
    figures = [{name: mode[name] for name in mode if name != "prompts"} for mode in document["modes"]]
    return {"verdict": document["verdict"], "status": status, "seconds": seconds, "calls": calls, "modes": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--run", action="append", choices=tuple(RUNS))
    parser.add_argument("--arms", default="device")
    parser.add_argument("--invariant", action="store_true", help="gate engines whose rows do not depend on others")
    parser.add_argument("--records", type=Path, help="where else than in OUT/records")
    parser.add_argument("--commit", help="what this source tree is, where it is no repository")
    options = parser.parse_args()
    names = options.run or tuple(RUNS)
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as models, ThreadPoolExecutor(len(names)) as pool:
        of_all = options.arms, options.invariant, Path(models), options.out, options.records or options.out / "records"
        runs = [pool.submit(gate, name, *of_all) for name in names]
        results = {name: run.result() for name, run in zip(names, runs, strict=True)}
    document = {
        "benchmark": "device_gates",
        "arms": options.arms,
        "invariant": options.invariant,
        "runs": results,
        "conditions": {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "versions": versions() | ({"commit": options.commit} if options.commit else {}),
            "seconds": round(time.perf_counter() - begin, 1),
        },
    }
    text = json.dumps(document, indent=1, allow_nan=False)
    (options.out / "gates.json").write_text(text + "\n")
    print(text)
    sys.exit(any(result["status"] != 0 for result in results.values()))


if __name__ == "__main__":
    main()
