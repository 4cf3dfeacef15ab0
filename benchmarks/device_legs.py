"""What moving Mamba-2's projections alone to the reference arm changes: `hemiola legs` on a seeded checkpoint.

    PYTHONPATH=. python3 -m benchmarks.device_legs OUT [--scans] [--synthetic lightning-30b] [--repeats 3]

Run it in the root of the source tree; hemiola need not be installed. In the `lightning` layout linear_fp8 is the op of
Mamba-2's in_proj and out_proj, and of nothing else. Leg a is the device arm, leg b the same with linear_fp8 on the
reference arm, with --scans leg c with ssd_scan and mamba2_update there; all without CUDA graphs, which a leg with
reference calls cannot replay. Cells: decode at batch 1 and 8. Each leg is held to vLLM's answers first. Busy fractions
need NVML's Python package. On one H200 two gates and six runs of 15 to 25 s each are expected, three minutes together;
half as much again with --scans.

--synthetic measures a model of true shapes instead, without a golden: six runs of about a minute each.

Written into OUT: legs.json (what `hemiola legs --json` writes), records (for `hemiola report`) and legs.log (its
report), which is printed, too. Exit status: that of `hemiola legs`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.golden import FOLDER
from tests.support.seeded_checkpoint import write_seeded_checkpoint

SCHEME = "lightning"
PROJECTIONS = ["--leg", "a=device", "--leg", "b=device,linear_fp8=reference"]
SCANS = ["--leg", "c=device,ssd_scan=reference,mamba2_update=reference"]
CELLS = ["--batch", "1", "--batch", "8", "--steps", "128"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--scans", action="store_true")
    parser.add_argument("--synthetic")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as models:
        if options.synthetic:
            model = ["--synthetic", options.synthetic]
        else:
            folder = Path(models) / SCHEME
            write_seeded_checkpoint(folder, SCHEME)
            model = ["--model", str(folder), "--golden", str(FOLDER / f"golden-{SCHEME}.json")]
            model += ["--gate-max-num-seqs", "24", "--dtype", "bf16"]
        command = [sys.executable, "-m", "hemiola", "legs", *model, *PROJECTIONS, *(SCANS if options.scans else [])]
        command += [*CELLS, "--repeats", str(options.repeats), "--no-cuda-graphs"]
        done = subprocess.run(
            [*command, "--json", str(options.out / "legs.json"), "--record", str(options.out / "records")],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
    (options.out / "legs.log").write_text(done.stdout)
    print(done.stdout, end="")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
