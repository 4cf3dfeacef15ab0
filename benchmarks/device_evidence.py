"""All that docs/device.md rests on, in one command: tests, gates and measurements on one GPU or several of one host.

    PYTHONPATH=. python3 -m benchmarks.device_evidence OUT [--gpus 0,1] [--only NAME ...]

Run it in the root of the source tree; hemiola need not be installed. Where nothing is timed, all steps of a phase run
side by side; where something is, a GPU has one at a time, and a phase begins when the one before has ended. On one H200
with 16 cores about twelve minutes are expected. Written into OUT: a log of each step, a document of each gate and
measurement, the records that they share (`hemiola report OUT/records`), and evidence.json: command, GPU, seconds and
exit status of what has ended so far. Exit status: 0 where all are, else 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

ALONE = ("tests/device/test_serve.py", "tests/device/test_engine.py::test_a_part_of_the_gpus_memory_is_filled")
_SOME = tuple(part for batch in (1, 8, 64, 256) for part in ("--batch", str(batch)))
_SOME += tuple(part for prompts in ("1x8192", "16x1024") for part in ("--prefill", prompts))
MODELS = {"lightning-30b": (), "nano-fp8-30b": _SOME, "nano-bf16-30b": _SOME}  # with the cells that are measured
WORKERS = 12  # of the tests, where pytest-xdist is there


@dataclass(frozen=True, slots=True)
class Step:
    """arguments: of Python."""

    name: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Phase:
    """is_alone: a GPU has one step at a time."""

    steps: tuple[Step, ...]
    is_alone: bool = True


def phases(out: Path) -> tuple[Phase, ...]:
    """Gates before what they vouch for; in a phase, what matters most first."""
    records = str(out / "records")
    once = ("--repeats", "1")
    workers = ("-n", str(WORKERS)) if importlib.util.find_spec("xdist") else ()

    def tests(name: str, *arguments: str) -> Step:
        return Step(name, ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", *arguments))

    def gates(name: str, *options: str) -> Step:
        return Step(name, ("-m", "benchmarks.device_gates", str(out / name), "--records", records, *options))

    def bench(name: str, model: str, *options: str) -> Step:
        files = ("--record", records, "--json", str(out / f"{name}.json"))
        return Step(name, ("-m", "hemiola", "bench", "--synthetic", model, *files, *options))

    checks = (
        tests("tests", "tests/device", *(part for test in ALONE for part in ("--deselect", test)), *workers),
        gates("gates"),
        gates("gates-invariant", "--invariant"),
    )
    long = ("lightning-30b", "--long", *once)
    measurements = (
        *(bench(model, model, *cells, "--profile") for model, cells in MODELS.items()),
        bench("lightning-30b-long", *long, "--profile"),
        *(bench(f"{model}-invariant", model, *cells, *once, "--invariant") for model, cells in MODELS.items()),
        bench("lightning-30b-long-invariant", *long, "--invariant"),
        Step("structured", ("-m", "benchmarks.device_structured")),
    )
    return Phase(checks, is_alone=False), Phase((tests("tests-alone", *ALONE),)), Phase(measurements)


def run_phases(
    asked: Iterable[Phase], gpus: Sequence[str], out: Path, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """What became of each step, in the order of their ends; also in OUT/evidence.json, from the first end on."""
    done: list[dict[str, Any]] = []
    writing = Lock()

    def run(step: Step, free: SimpleQueue[str]) -> None:
        gpu = free.get()
        cache = os.environ.get("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "TRITON_CACHE_DIR": f"{cache}-{gpu}"}
        tell(f"{step.name} on GPU {gpu}")
        begin = time.perf_counter()
        with (out / f"{step.name}.log").open("w") as log:
            command = [sys.executable, *step.arguments]
            status = subprocess.run(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False
            ).returncode
        seconds = round(time.perf_counter() - begin, 1)
        free.put(gpu)
        with writing:
            done.append(
                {"step": step.name, "command": step.arguments, "gpu": gpu, "seconds": seconds, "status": status}
            )
            (out / "evidence.json").write_text(json.dumps(done, indent=1) + "\n")
        tell(f"{step.name} ended with {status} after {seconds} s")

    for phase in asked:
        free: SimpleQueue[str] = SimpleQueue()
        places = len(gpus) if phase.is_alone else max(len(gpus), len(phase.steps))
        for place in range(places):
            free.put(gpus[place % len(gpus)])
        with ThreadPoolExecutor(places) as pool:
            for ended in [pool.submit(run, step, free) for step in phase.steps]:
                ended.result()
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", default="0", help="as CUDA_VISIBLE_DEVICES names them")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="steps to run, of all")
    options = parser.parse_args()
    asked = phases(options.out)
    if unknown := set(options.only or ()) - {step.name for phase in asked for step in phase.steps}:
        parser.error(f"no step {', '.join(sorted(unknown))}")
    if options.only:
        chosen = [tuple(step for step in phase.steps if step.name in options.only) for phase in asked]
        asked = tuple(replace(phase, steps=steps) for phase, steps in zip(asked, chosen, strict=True) if steps)
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()

    def tell(text: str) -> None:
        print(f"{time.perf_counter() - begin:6.0f} s  {text}", file=sys.stderr, flush=True)

    done = run_phases(asked, options.gpus.split(","), options.out, tell)
    sys.exit(any(step["status"] for step in done))


if __name__ == "__main__":
    main()
