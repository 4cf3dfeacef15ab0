"""The seeded checkpoints against oracles' answers for them, `hemiola gate` in a process each: verdicts as JSON.

    PYTHONPATH=. python3 -m benchmarks.device_gates OUT [--scheme bf16 ...] [--arms device] [--invariant] [--records R]

Run it in the root of the source tree; hemiola need not be installed. All five run at once, both modes, 24 prompts each:
on one H200 with 16 cores under a minute is expected, most of it Triton's first compilation. Written into OUT:
SCHEME.json (what `hemiola gate --json` writes), SCHEME.log (its report), records (for `hemiola bench --record` and
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
from typing import Any

import torch

from hemiola.bench.machine import versions
from tests.support.golden import FOLDER, SCHEMES, WIDE
from tests.support.seeded_checkpoint import write_seeded_checkpoint

# One of them two at a time, so that what is for one or two tokens is gated, too; the others all 24 prompts together.
NUM_SEQS = {"bf16": 2}


def gate(scheme: str, arms: str, invariant: bool, models: Path, out: Path, records: Path) -> dict[str, Any]:
    """Write a scheme's checkpoint and gate it; without a verdict, `verdict` is None and the log says why."""
    begin = time.perf_counter()
    write_seeded_checkpoint(models / scheme, scheme)
    written = time.perf_counter()
    result, log = out / f"{scheme}.json", out / f"{scheme}.log"
    num_seqs = str(NUM_SEQS.get(scheme, 24))
    options = ["--arms", arms, "--dtype", "bf16", "--max-num-seqs", num_seqs, "--json", str(result)]
    options += ["--record", str(records), *(["--invariant"] if invariant else [])]
    command = [sys.executable, "-m", "hemiola", "gate", str(models / scheme), str(FOLDER / f"golden-{scheme}.json")]
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
    parser.add_argument("--scheme", action="append", choices=(*SCHEMES, WIDE))
    parser.add_argument("--arms", default="device")
    parser.add_argument("--invariant", action="store_true", help="gate engines whose rows do not depend on others")
    parser.add_argument("--records", type=Path, help="where else than in OUT/records")
    parser.add_argument("--commit", help="what this source tree is, where it is no repository")
    options = parser.parse_args()
    schemes = options.scheme or (*SCHEMES, WIDE)
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as models, ThreadPoolExecutor(len(schemes)) as pool:
        of_all = options.arms, options.invariant, Path(models), options.out, options.records or options.out / "records"
        runs = [pool.submit(gate, scheme, *of_all) for scheme in schemes]
        results = {scheme: run.result() for scheme, run in zip(schemes, runs, strict=True)}
    document = {
        "benchmark": "device_gates",
        "arms": options.arms,
        "invariant": options.invariant,
        "schemes": results,
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
