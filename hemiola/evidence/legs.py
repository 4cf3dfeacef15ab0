"""Legs: one checkpoint, measured by engines that differ in named arms alone, each run a process of its own.

A run is `hemiola bench` and nothing else; its document says what was measured and, by counters, what ran. The order
turns round from repeat to repeat (a b, b a, a b, ...), so that a drift of the machine falls on all legs alike. Two legs
are compared repeat by repeat: a difference counts where it has the same sign in all of them and no time of the one lies
among the other's, and is no difference otherwise: of two equal legs, one in ten would show one by chance with three
repeats. A leg whose runs do not prove its arms is void, and has no figures.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hemiola.evidence.facts import path_facts
from hemiola.evidence.gating import too_few
from hemiola.evidence.golden import EvidenceError
from hemiola.evidence.paths import Arms, Counts, check_paths, describe_paths
from hemiola.evidence.records import Claim, Figure, Mark
from hemiola.ops import Path as OpPath
from hemiola.ops.table import OTHERS

FEWEST = 3  # repeats that a difference needs


@dataclass(frozen=True, slots=True)
class Leg:
    """arms: as EngineConfig has them. given: the same as the command line has them."""

    name: str
    arms: Arms
    given: str


@dataclass(frozen=True, slots=True)
class CellRun:
    """ms: per decode step, or of a prefill. busy: the part of the time with a kernel running; None, and why."""

    ms: float
    busy: float | None
    why: str
    unsteady: str = ""


@dataclass(frozen=True, slots=True)
class LegRun:
    """One process. void: why it proves nothing; then it has no cells."""

    leg: str
    repeat: int
    cells: Mapping[str, CellRun] = field(default_factory=dict)
    counts: Counts = field(default_factory=dict)
    replays_graphs: bool = False
    machine: Mapping[str, Any] = field(default_factory=dict)
    void: str = ""


@dataclass(frozen=True, slots=True)
class Gated:
    """What `hemiola gate` says of a leg's arms, its document included. why: where there is no verdict."""

    verdict: str
    why: str = ""
    document: Mapping[str, Any] = field(default_factory=dict)

    @property
    def why_ungated(self) -> str:
        """Why no speed rests on it, or nothing: a pass of enough positions that was recorded."""
        if not self.verdict.endswith("PASS"):
            return self.why or self.verdict
        if reason := too_few({mode["mode"]: mode["positions"] for mode in self.document["modes"]}):
            return f"its gate is {reason}"
        return "" if "record" in self.document else "its gate is not recorded"


@dataclass(frozen=True, slots=True)
class Difference:
    """A leg against the first one in one cell. deltas_ms: its time less the first leg's, repeat by repeat.
    overlaps: whether some time of the one lies among the other's. declined: why they are not compared; then there are
    no deltas."""

    leg: str
    base: str
    cell: str
    deltas_ms: Sequence[float] = ()
    ratio: float | None = None
    overlaps: bool = False
    declined: str = ""

    @property
    def verdict(self) -> str:
        """slower, faster, no difference or declined."""
        if self.declined:
            return "declined"
        if self.overlaps:
            return "no difference"
        if all(delta > 0 for delta in self.deltas_ms):
            return "slower"
        return "faster" if all(delta < 0 for delta in self.deltas_ms) else "no difference"

    def line(self) -> str:
        """For people; the ratio is of the medians, and is told of a difference only."""
        begin = f"{self.leg} against {self.base}, {self.cell}: {self.verdict}"
        if self.declined:
            return f"{begin}: {self.declined}"
        told = ", ".join(f"{delta:+.3f}" for delta in self.deltas_ms)
        if self.verdict == "no difference":
            has_both = min(self.deltas_ms) <= 0 <= max(self.deltas_ms)
            why = "its sign changes between repeats" if has_both else "the times of both overlap"
            return f"{begin}: {why} ({told} ms)"
        return f"{begin} by {statistics.median(self.deltas_ms):+.3f} ms, {self.ratio:.3f} times ({told})"


@dataclass(frozen=True, slots=True)
class LegsResult:
    """runs: in the order in which they ran. gates: by leg."""

    model: str
    legs: Sequence[Leg]
    runs: Sequence[LegRun]
    gates: Mapping[str, Gated]

    def void(self, leg: str) -> str:
        """Why a leg is void, or nothing: one run that proves nothing is enough."""
        return next((run.void for run in self.runs if run.leg == leg and run.void), "")

    @property
    def is_red(self) -> bool:
        """Whether a leg is void, or its tokens are not the golden's."""
        return any(self.void(leg.name) for leg in self.legs) or any(
            not gated.verdict.endswith("PASS") for gated in self.gates.values() if gated.verdict != Mark.UNGATED.value
        )

    @property
    def cells(self) -> list[str]:
        return list(dict.fromkeys(cell for run in self.runs for cell in run.cells))

    def of(self, leg: str, cell: str) -> list[CellRun]:
        """A leg's runs of a cell, repeat by repeat; none of a void leg."""
        runs = sorted((run for run in self.runs if run.leg == leg), key=lambda run: run.repeat)
        return [] if self.void(leg) else [run.cells[cell] for run in runs]

    def differences(self) -> Iterator[Difference]:
        """Every leg against the first one, cell by cell."""
        base, *others = (leg.name for leg in self.legs)
        for cell in self.cells:
            for leg in others:
                if declined := self._why_not(base, leg, cell):
                    yield Difference(leg, base, cell, declined=declined)
                    continue
                own, theirs = ([run.ms for run in self.of(name, cell)] for name in (leg, base))
                deltas = [a - b for a, b in zip(own, theirs, strict=True)]
                ratio = statistics.median(own) / statistics.median(theirs)
                overlaps = max(min(own), min(theirs)) <= min(max(own), max(theirs))
                yield Difference(leg, base, cell, deltas, ratio, overlaps)

    def _why_not(self, one: str, other: str, cell: str) -> str:
        """Why two legs are not compared, or nothing."""
        for leg in (one, other):
            if reason := self.void(leg):
                return f"leg {leg} is void ({reason})"
            if shaken := next((run.unsteady for run in self.of(leg, cell) if run.unsteady), ""):
                return f"leg {leg} ran on an unsteady machine ({shaken})"
        runs = [run for run in self.runs if run.leg in (one, other)]
        if (repeats := len(self.of(one, cell))) < FEWEST:
            return f"{repeats} of at least {FEWEST} repeats"
        if any(run.machine != runs[0].machine for run in runs):
            return "the machine is not the same in all runs"
        if len({run.replays_graphs for run in runs}) > 1:
            return "only one of them replays CUDA graphs: run both with --no-cuda-graphs"
        return ""

    def lines(self) -> Iterator[str]:
        """The report, for people."""
        repeats = 1 + max(run.repeat for run in self.runs)
        yield f"{self.model}: {len(self.runs)} processes, {repeats} repeats, order {' '.join(r.leg for r in self.runs)}"
        for leg in self.legs:
            gated = self.gates[leg.name]
            verdict = f"{gated.verdict}{f' ({gated.why})' if gated.why else ''}"
            if reason := self.void(leg.name):
                yield f"leg {leg.name}, {leg.given}: VOID, {reason}; gate {verdict}"
                continue
            run = next(run for run in self.runs if run.leg == leg.name)
            graphs = ", graphs replayed" if run.replays_graphs else ""
            yield f"leg {leg.name}, {leg.given}: {describe_paths(run.counts)}{graphs}; gate {verdict}"
        width = max(len(cell) for cell in [*self.cells, "cell"])
        yield f"{'cell':<{width}}  leg  {'n':>2} {'median ms':>10} {'min .. max':>19} {'GPU busy':>9}  gate"
        for cell in self.cells:
            for leg in self.legs:
                if runs := self.of(leg.name, cell):
                    ms, busy = sorted(run.ms for run in runs), [r.busy for r in runs if r.busy is not None]
                    told = f"{statistics.median(busy):.1%}" if busy else "-"
                    yield (
                        f"{cell:<{width}}  {leg.name:<4} {len(ms):>2} {statistics.median(ms):>10.3f} "
                        f"{f'{ms[0]:.3f} .. {ms[-1]:.3f}':>19} {told:>9}  {self.gates[leg.name].verdict}"
                    )
        yield from (difference.line() for difference in self.differences())
        if _names_alike(self):
            yield f"legs that ran the same paths, controls of each other: {', '.join(_names_alike(self))}"

    def claim(self, run: Sequence[str], source: Mapping[str, Any]) -> Claim:
        """What a record says of it. run, source: see `Claim`."""
        void = {leg.name: self.void(leg.name) for leg in self.legs if self.void(leg.name)}
        ungated = [f"leg {name}: {gated.why_ungated}" for name, gated in self.gates.items() if gated.why_ungated]
        if source["is_dirty"]:
            ungated = ["the tree is dirty, a gate is of one commit"]
        marks = {}
        if void:
            marks[Mark.VOID.value] = "; ".join(f"leg {name}: {why}" for name, why in void.items())
        if ungated:
            marks[Mark.UNGATED.value] = "; ".join(ungated)
        machine = next((run.machine for run in self.runs if run.machine), {})
        device = machine.get("device", {})
        figures = []
        for leg in self.legs:
            for cell in self.cells if leg.name not in void else []:
                times = _summary(self.of(leg.name, cell))
                spread = (times[key] for key in ("unit", "n", "low", "high"))
                figures.append(Figure(f"leg {leg.name}, {cell}", times["median"], *spread))
        return Claim(
            kind="legs",
            run=run,
            source=source,
            model={"name": Path(self.model).name},
            engine={"legs": {leg.name: leg.given for leg in self.legs}},
            machine={
                "device": device.get("name") or device.get("type"),
                "driver": device.get("driver"),
                "versions": machine.get("versions"),
            },
            workload={"cells": self.cells, "order": [run.leg for run in self.runs], "cache": {"state": "cold"}},
            paths=[
                path | {"leg": run.leg}
                for run in self.runs
                if run.repeat == 0
                for path in path_facts(run.counts.items())
            ],
            verdict="\n".join(difference.line() for difference in self.differences()),
            gated_by=[]
            if source["is_dirty"]
            else [gated.document["record"] for gated in self.gates.values() if not gated.why_ungated],
            marks=marks,
            figures=figures,
            more=self.as_dict(),
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything, in JSON's types."""
        return {
            "model": self.model,
            "order": [run.leg for run in self.runs],
            "legs": [
                {
                    "leg": leg.name,
                    "arms": leg.arms if isinstance(leg.arms, str) else dict(leg.arms),
                    "void": self.void(leg.name),
                    "gate": self.gates[leg.name].verdict,
                    "why_no_gate": self.gates[leg.name].why,
                    "cells": {
                        cell: _summary(self.of(leg.name, cell)) for cell in self.cells if self.of(leg.name, cell)
                    },
                    "paths": next((path_facts(run.counts.items()) for run in self.runs if run.leg == leg.name), []),
                    "graphs": any(run.replays_graphs for run in self.runs if run.leg == leg.name),
                }
                for leg in self.legs
            ],
            "differences": [
                {
                    "leg": d.leg,
                    "base": d.base,
                    "cell": d.cell,
                    "verdict": d.verdict,
                    "declined": d.declined,
                    "deltas_ms": list(d.deltas_ms),
                    "ratio": d.ratio,
                }
                for d in self.differences()
            ],
            "machine": next((dict(run.machine) for run in self.runs if run.machine), {}),
            "red": self.is_red,
        }


Measure = Callable[[Leg, int], LegRun]
Gate = Callable[[Leg], Gated]


def run_legs(
    model: str,
    legs: Sequence[Leg],
    repeats: int,
    measure: Measure,
    gate: Gate,
    progress: Callable[[str], None] = lambda what: None,
) -> LegsResult:
    """Gate every leg once, and then measure all of them `repeats` times. progress: called with what comes next.

    Raises: EvidenceError for fewer than two legs, and names that are given twice.
    """
    if len(legs) < 2 or len({leg.name for leg in legs}) < len(legs):
        raise EvidenceError(
            "legs are two or more, each with its name",
            found=", ".join(leg.name for leg in legs) or "none",
            expected="A=ARMS and B=ARMS",
            where="legs",
        )
    gates = {}
    for leg in legs:
        progress(f"gate of leg {leg.name}")
        gates[leg.name] = gate(leg)
    runs = []
    for repeat in range(repeats):
        for leg in legs if repeat % 2 == 0 else legs[::-1]:
            progress(f"leg {leg.name}, repeat {repeat + 1} of {repeats}")
            runs.append(measure(leg, repeat))
    return LegsResult(model, legs, runs, gates)


@dataclass(frozen=True, slots=True)
class Processes:
    """Runs of `hemiola`, a process each. model: its options (--model FOLDER, or --synthetic NAME). golden: of the
    checkpoint, or None. shared: options of both commands; bench: of `hemiola bench` alone; gate: of `hemiola gate`."""

    model: Sequence[str]
    golden: Path | None
    shared: Sequence[str] = ()
    bench: Sequence[str] = ()
    gating: Sequence[str] = ()

    def measure(self, leg: Leg, repeat: int) -> LegRun:
        status, document, said = _run(["bench", *self.model, *self.bench, *self.shared, "--arms", leg.given])
        if status != 0 or document is None:
            return LegRun(leg.name, repeat, void=f"hemiola bench ended with status {status}: {said}")
        return read_run(leg, repeat, document)

    def gate(self, leg: Leg) -> Gated:
        if self.golden is None:
            return Gated(Mark.UNGATED.value, "no golden was given")
        command = ["gate", self.model[-1], str(self.golden), *self.gating, *self.shared, "--arms", leg.given]
        status, document, said = _run(command)
        if document is None:
            return Gated("NO VERDICT", f"status {status}: {said}")
        return Gated(document["verdict"], document=document)


def read_run(leg: Leg, repeat: int, document: Mapping[str, Any]) -> LegRun:
    """What a document of `hemiola bench` says of a leg; void where its counters do not show the leg's arms."""
    calls = document["paths"]["calls"]
    counts = {OpPath(*(call[name] for name in OpPath._fields)): call["calls"] for call in calls}
    try:
        check_paths(counts, leg.arms)
    except EvidenceError as error:
        return LegRun(leg.name, repeat, void=str(error))
    named = set() if isinstance(leg.arms, str) else set(leg.arms) - {OTHERS}
    if idle := sorted(named - {path.op for path in counts}):
        return LegRun(
            leg.name, repeat, void=f"no call of {', '.join(idle)} was counted: the leg moves what does not run"
        )
    conditions = document["conditions"]
    device = {name: conditions["device"].get(name) for name in ("type", "name", "driver")}
    return LegRun(
        leg.name,
        repeat,
        {row["cell"]: _cell(row) for row in document["cells"]},
        counts,
        document["memory"]["graph_capture_s"] > 0,
        {"device": device, "versions": conditions["versions"]},
    )


def _cell(row: Mapping[str, Any]) -> CellRun:
    if row["kind"] == "prefill":
        return CellRun(1000 * row["seconds"], None, "not sampled in a prefill")
    nvml = row["nvml"]
    return CellRun(row["ms_per_step"], nvml["busy"], nvml.get("why", ""), nvml.get("unsteady", ""))


def _run(arguments: Sequence[str]) -> tuple[int, dict[str, Any] | None, str]:
    """Status of a command, the document that it wrote or None, and the last two lines that it said on stderr."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "document.json"
        command = [sys.executable, "-m", "hemiola", *arguments, "--json", str(file)]
        done = subprocess.run(command, text=True, capture_output=True, check=False)
        document = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    return done.returncode, document, "; ".join(done.stderr.strip().splitlines()[-2:]) or "nothing said"


def _summary(runs: Sequence[CellRun]) -> dict[str, Any]:
    ms, busy = [run.ms for run in runs], [run.busy for run in runs if run.busy is not None]
    return {
        "unit": "ms",
        "n": len(ms),
        "median": statistics.median(ms),
        "low": min(ms),
        "high": max(ms),
        "samples": ms,
        "busy": statistics.median(busy) if busy else None,
        "busy_samples": busy,
        "why": "" if busy else runs[0].why,
    }


def _names_alike(result: LegsResult) -> list[str]:
    """Legs whose ops ran on the same arms as another leg's."""
    ran = {run.leg: frozenset((path.op, path.arm) for path in run.counts) for run in result.runs if run.counts}
    return [leg for leg, paths in ran.items() if list(ran.values()).count(paths) > 1]
