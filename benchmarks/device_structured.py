"""What requests of a required form cost those beside them: milliseconds a decode step with none, one, and more of them.

    PYTHONPATH=. python3 -m benchmarks.device_structured [--synthetic lightning-30b] [--batch 64] [--structured 1,8]

Weights are drawn, the vocabulary is that of benchmarks.structured at the model's size, and every structured request
writes an array of records that does not end. Masks are made when the ids of the step before are known, while the device
computes. The last line is a JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.structured import ITEM, definition, made_up_vocabulary
from hemiola.bench import cell
from hemiola.bench.cells import Driver
from hemiola.bench.machine import versions
from hemiola.bench.run import BenchOptions, engine_config
from hemiola.bench.start import start
from hemiola.config.sampling import SamplingParams, StructuredSpec
from hemiola.structured import Grammars
from hemiola.text.tokenizer import Tokenizer

ENDLESS = {"type": "array", "items": ITEM, "minItems": 100_000}
EOS = 2


def grammars(vocab_size: int) -> Grammars:
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = made_up_vocabulary(vocab_size, vocab_size // 131)
        (Path(folder) / "tokenizer.json").write_text(definition(vocabulary), encoding="utf-8")
        tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return Grammars(tokenizer, vocab_size, [EOS])


def step_times(driver: Driver, made: Grammars, batch: int, structured: int, steps: int) -> list[float]:
    """Seconds of each step once all requests decode, `structured` of `batch` with a grammar."""
    params = SamplingParams(structured=StructuredSpec(json_schema=ENDLESS))
    made.check(params)
    requests = driver.add(driver.prompts(batch, 128), steps + 16)
    for request in requests[:structured]:
        request.constraint = made.constraint(params, request.prompt_ids)
    while any(len(request.output_ids) < 4 for request in requests):
        driver.engine.step()
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        driver.engine.step()
        times.append(time.perf_counter() - begin)
    driver.synchronize()
    driver.withdraw(requests)
    for request in requests:
        if request.error is not None:
            raise request.error
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--synthetic", default="lightning-30b")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--structured", default="1,8")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--arms", default="auto")
    options = parser.parse_args()
    config = engine_config(
        BenchOptions(
            synthetic=options.synthetic,
            cells=(cell("decode", str(options.batch), options.steps + 16),),
            settings={"arms": options.arms},
        )
    )
    started = start(None, options.synthetic, config)
    driver = Driver(started.engine, started.synchronize)
    made = grammars(started.config.vocab_size)
    rows: list[dict[str, Any]] = []
    counts = [0, *map(int, options.structured.split(","))]
    for structured in (*counts, *counts):  # the first round compiles and captures
        times = step_times(driver, made, options.batch, structured, options.steps)
        ms = {"median_ms": statistics.median(times) * 1e3, "max_ms": max(times) * 1e3, "steps": len(times)}
        rows.append({"structured": structured, **ms})
    rows = rows[len(counts) :]
    for row in rows:
        print(
            f"batch {options.batch}, {row['structured']} structured: {row['median_ms']:.3f} ms a step, "
            f"at most {row['max_ms']:.3f}",
            file=sys.stderr,
        )
    device = torch.cuda.get_device_name() if started.device.type == "cuda" else "cpu"
    conditions = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "device": device, "versions": versions()}
    print(json.dumps({"model": options.synthetic, "batch": options.batch, "rows": rows, "conditions": conditions}))


if __name__ == "__main__":
    main()
