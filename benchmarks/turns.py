"""Ways of computing a decode step against each other, in one process and one model: milliseconds a step.

    PYTHONPATH=. python3 -m benchmarks.turns nano-bf16-30b 1 64 64x8192 \\
        --way 'kernels.rows_mma: GROUP_TILES[BF16] = ((30.0, GroupTile(24, 20, 2, 1, 80, 8)),)' \\
        --way 'ops.device.moe_experts: TOGETHER_TOKENS[BF16] = 64 && kernels.dense_wgmma: LEAST_TOKENS = 9'

A kernel alone and the same kernel among a step's others rank ways differently, and so do two cards: what counts is
measured here, on the same requests while they are decoded, in turns of a fraction of a second, so that a card that
warms up slows all of them. Medians of three turns repeated within 0.5 % on an H200. A cell is BATCH, or BATCHxTOKENS
of each prompt. A way is one assignment or more, each in a module of hemiola, whose names it may use; the first of each
cell is the code as it is. The last line is a JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

from hemiola.bench import cell
from hemiola.bench.cells import Driver
from hemiola.bench.machine import describe_device, machine_facts
from hemiola.bench.run import BenchOptions, engine_config
from hemiola.bench.start import start

OWN = "as it is"
SETTLING = 6  # steps of a turn before it is timed, of which one may capture a graph


class Ways:
    """Assignments in modules, those of one way at a time.

    names: "MODULE: NAME = VALUE" of a module of hemiola, or more of them between "&&". Raises: ValueError where one is
    of another form, ImportError.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.assignments = {OWN: list[tuple[str, str]]()}
        self.assignments |= {name: [_assignment(part) for part in name.split("&&")] for name in names}
        modules = {module for parts in self.assignments.values() for module, _ in parts}
        # A dictionary's own entries, too: it may be assigned into, and other modules may hold it.
        self._before = {
            module: {name: (value, dict(value) if isinstance(value, dict) else None) for name, value in _names(module)}
            for module in modules
        }

    def take(self, way: str) -> None:
        """From now on this way is, and no other."""
        for module, before in self._before.items():
            namespace = vars(import_module(module))
            for name, (value, entries) in before.items():
                namespace[name] = value
                if entries is not None:
                    value.clear()
                    value.update(entries)
        for module, assignment in self.assignments[way]:
            exec(assignment, vars(import_module(module)))


def _assignment(part: str) -> tuple[str, str]:
    module, colon, assignment = (text.strip() for text in part.partition(":"))
    if not colon or "=" not in assignment:
        raise ValueError(f"no assignment in a module: {part.strip()!r}; expected 'kernels.rows_mma: NAME = VALUE'")
    return f"hemiola.{module}", assignment


def _names(module: str) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(import_module(module)).items() if not name.startswith("__")]


def in_turns(
    driver: Driver, ways: Sequence[str], take: Callable[[str], None], rounds: int, steps: int
) -> dict[str, list[float]]:
    """Milliseconds a step of what is being decoded, by way, one of each round; every other round goes backwards. take:
    has a way taken from now on."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for index in range(rounds):
        for way in ways if index % 2 == 0 else reversed(ways):
            take(way)
            for _ in range(SETTLING):
                driver.engine.step()
            driver.synchronize()
            begin = time.perf_counter()
            for _ in range(steps):
                driver.engine.step()
            driver.synchronize()
            times[way].append(1000 * (time.perf_counter() - begin) / steps)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a synthetic geometry")
    parser.add_argument("cells", nargs="+", metavar="BATCH[xTOKENS]")
    parser.add_argument("--way", action="append", default=[], metavar="MODULE: NAME = VALUE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="of a turn, that are timed")
    options = parser.parse_args()
    ways = Ways(options.way)
    names = list(ways.assignments)
    outputs = 8 + options.rounds * len(names) * (SETTLING + options.steps)
    cells = tuple(cell("decode", text, outputs) for text in options.cells)
    started = start(None, options.model, engine_config(BenchOptions(synthetic=options.model, cells=cells)))
    driver, runner = Driver(started.engine, started.synchronize), started.engine.runner
    results = []
    # All graphs are kept to the end: torch takes their memory apart when none of them is left.
    graphs: dict[tuple[str, str], dict[Any, Any]] = {}
    for one in cells:

        def take(way: str, of: str = one.name) -> None:
            ways.take(way)
            runner._graphs = graphs.setdefault((of, way), {})  # they replay the way that they were captured with

        take(OWN)
        requests = driver.decoding(driver.prompts(one.batch, one.prompt_tokens), outputs)
        times = in_turns(driver, names, take, options.rounds, options.steps)
        driver.withdraw(requests)
        results.append({"cell": one.name, "ms_per_step": times})
        first = statistics.median(times[OWN])
        for way, samples in times.items():
            median, told = statistics.median(samples), ", ".join(f"{ms:.3f}" for ms in samples)
            print(f"{one.name}: {median:.3f} ms a step ({median / first - 1:+.1%}; {told}), {way}", file=sys.stderr)
    ways.take(OWN)
    conditions = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(describe_device(started.device)),
        "rounds": options.rounds,
        "steps": options.steps,
    }
    print(json.dumps({"benchmark": "turns", "model": options.model, "cells": results, "conditions": conditions}))


if __name__ == "__main__":
    main()
