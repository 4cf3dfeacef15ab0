"""`hemiola bench` on the CPU, end to end with the reference arm, and the arithmetic of its figures."""

from __future__ import annotations

import io
import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import hemiola
import hemiola.bench.__main__ as process
from hemiola.bench import Cell, Observation, WindowError, cell
from hemiola.bench.cells import SHORT_OUTPUT, Driver, Run, measure
from hemiola.bench.machine import AT_ONCE, _seconds, copy_bandwidth, read_bandwidth, source_facts
from hemiola.bench.run import BenchOptions, engine_config, run_bench
from hemiola.bench.trace import covered
from hemiola.bench.traffic import decode_traffic, distinct_experts
from hemiola.cli import app
from hemiola.cli.ending import FAILED
from hemiola.errors import ConfigError
from hemiola.evidence.records import read
from hemiola.simulate.geometry import Geometry
from hemiola.synthetic import geometry, open_synthetic

SMALL = [
    "--batch",
    "1x24",
    "--batch",
    "3x8",
    "--prefill",
    "2x40",
    "--steps",
    "64",  # long enough not to drown in what else the machine does
    "--repeats",
    "2",
    "--arms",
    "reference",
]


def run(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return run("--synthetic", "lightning-30b-tiny", *SMALL)


def test_every_cell_is_measured(document: dict[str, Any]) -> None:
    assert [row["cell"] for row in document["cells"]] == ["decode 1 x 24", "decode 3 x 8", "prefill 2 x 40"]
    for row in document["cells"][:2]:
        assert row["output_tokens"] == [16, 80]
        assert len(row["samples_ms"]) == 2
        assert row["tokens_per_s"] == pytest.approx(1000 * row["batch"] / row["ms_per_step"])
        assert 0 < row["first_token_s"] < row["whole_run_s"]
        assert len(row["samples_first_token_s"]) == 4
        assert row["fraction_of_copy"] == pytest.approx(row["bytes_per_s"] / document["copy"]["bytes_per_s"])
    assert document["cells"][2]["tokens_per_s"] == pytest.approx(80 / document["cells"][2]["seconds"])


def test_a_run_without_a_gpu_says_that_it_measures_no_device(document: dict[str, Any]) -> None:
    calls = document["paths"]["calls"]
    assert {row["arm"] for row in calls} == {"reference"}
    assert document["paths"]["reference_calls"] == sum(row["calls"] for row in calls) > 0
    assert "no device arm" in document["paths"]["verdict"]
    assert document["conditions"]["device"]["type"] == "cpu"
    assert document["cells"][0]["nvml"] == {"busy": None, "why": "no GPU"}
    assert document["synthetic"] is True


def test_start_and_memory_are_told_by_part(document: dict[str, Any]) -> None:
    parts = {name: value for name, value in document["start_s"].items() if name != "together"}
    assert set(parts) >= {"imports", "ops", "headers", "model", "weights", "engine", "first_tokens"}
    assert document["start_s"]["together"] == pytest.approx(sum(parts.values()))
    stored = sum(module.resident_bytes for module in open_synthetic("lightning-30b-tiny").modules)
    assert document["memory"]["weights_stored"] == document["memory"]["rows"]["weights"] == stored
    assert document["memory"]["caches"] > 0


def test_the_conditions_name_what_ran(document: dict[str, Any]) -> None:
    conditions = document["conditions"]
    assert torch.__version__.startswith(conditions["versions"]["torch"].partition("+")[0])
    assert conditions["versions"]["commit"]
    assert (conditions["repeats"], conditions["seed"]) == (2, 1)
    engine = document["engine"]
    assert (engine["dtype"], engine["kv_dtype"], engine["prefix_caching"]) == ("bf16", "bf16", False)
    assert set(engine["arms"].values()) == {"reference"}
    assert document["model"]["name"] == "lightning-30b-tiny"
    assert document["model"]["checkpoint_sha256"] is None
    assert "routed experts: W4A16_NVFP4" in document["model"]["stored"]


def test_what_nothing_vouches_for_says_so_first(document: dict[str, Any]) -> None:
    assert document["gate"] == "UNGATED: no folder of records was given to look for a gate"
    assert [next(iter(row)) for row in document["cells"]] == ["gate"] * 3
    assert all(row["gate"].startswith("UNGATED") for row in document["cells"])


def test_routing_is_reported_beside_its_expectation(document: dict[str, Any]) -> None:
    routing = document["routing"]
    assert len(routing["distinct_experts"]) == 5
    assert all(0 < count <= 16 for count in routing["distinct_experts"])
    assert 15 < routing["distinct_experts_expected"] <= 16
    assert routing["largest_share"] < 0.5


def test_a_checkpoint_is_measured_too_and_the_document_goes_where_it_is_sent(tmp_path: Path, tiny_folder: Any) -> None:
    file = tmp_path / "bench.json"
    arguments = [
        "--model",
        str(tiny_folder("M*-")),
        "--batch",
        "2x8",
        "--steps",
        "64",
        "--repeats",
        "1",
        "--json",
        str(file),
    ]
    result = CliRunner().invoke(app, ["bench", *arguments, "--arms", "reference"])
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    document = json.loads(file.read_text())
    assert document["synthetic"] is False
    assert document["routing"] is None
    assert "decode 2 x 8" in result.stderr


@pytest.mark.parametrize("text", ["", "0", "8x", "x8", "8x0", "a"])
def test_what_is_no_cell_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="BATCHxTOKENS"):
        cell("decode", text)


def test_cells_read_as_they_are_written() -> None:
    assert cell("decode", "8") == Cell("decode", 8, 128, 128)
    assert cell("decode", "1x1000", 5) == Cell("decode", 1, 1000, 5)
    assert cell("prefill", "16x1024").max_tokens == 1025


def test_the_caches_hold_the_largest_cell_at_once() -> None:
    cells = (cell("decode", "256"), cell("decode", "32x8192"))
    config = engine_config(BenchOptions(None, "lightning-30b", cells))
    plan = Geometry("lightning", geometry("lightning-30b").config, 2, 2).plan(config)
    assert plan.num_slots == 256
    assert plan.num_blocks * plan.block_size >= max(c.batch * c.max_tokens for c in cells)
    assert not config.prefix_caching


def test_bytes_of_a_step_are_those_of_the_published_accounting() -> None:
    manifest = open_synthetic("lightning-30b")
    config = manifest.geometry.config
    traffic = decode_traffic(manifest, config, 1, 0, 49_082_368, 6144)
    # 2.534 GB: experts 0.775, the shared ones 0.258, all else but states 1.403, states 0.098; without keys and values.
    shared = 23 * 2 * 3712 * 2688 * 9 // 16
    assert traffic.experts == pytest.approx(774_531_072 + shared, abs=8)
    assert traffic.states == 98_164_736
    assert traffic.total - traffic.kv == pytest.approx(2.534e9, rel=1e-3)
    assert traffic.kv == 6144
    assert distinct_experts(config, 64) == pytest.approx(122.1, abs=0.05)
    grown = [decode_traffic(manifest, config, batch, 100, 49_082_368, 6144).total for batch in (1, 8, 64, 256)]
    assert all(small < large for small, large in pairwise(grown))


def test_time_covered_by_overlapping_kernels_is_counted_once() -> None:
    assert covered([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5), (6.0, 6.5)], (0.0, 7.0)) == 5.0
    kernels = [(0.0, 10.0), (5.0, 15.0), (20.0, 25.0)]
    assert covered(kernels, (0.0, 30.0)) == 20.0


def test_time_covered_outside_of_the_window_does_not_count() -> None:
    prefill, crossing, inside, after = (-40.0, -3.0), (-2.0, 4.0), (10.0, 12.0), (28.0, 35.0)
    assert covered([prefill, crossing, inside, after], (0.0, 30.0)) == 4.0 + 2.0 + 2.0
    assert covered([prefill, (31.0, 32.0)], (0.0, 30.0)) == 0.0


KERNELS = Path(hemiola.__file__).parent / "kernels"


@pytest.mark.parametrize("suffix", sorted({file.suffix for file in KERNELS.iterdir() if file.is_file()}))
def test_the_sources_are_known_without_a_repository(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, suffix: str
) -> None:
    package = tmp_path / "hemiola"
    (package / "kernels").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    kernel = package / "kernels" / f"k{suffix}"
    kernel.write_text("one")
    monkeypatch.setattr("hemiola.__file__", str(package / "__init__.py"))
    before = source_facts()
    assert (before["commit"], before["is_dirty"]) == (None, None)
    (package / "notes.txt").write_text("does not compute")
    assert source_facts() == before
    kernel.write_text("two")
    assert source_facts()["sha256"] != before["sha256"]


def test_copying_is_measured_in_bytes_read_and_written() -> None:
    copies = copy_bandwidth(torch.device("cpu"), 1 << 20, repeats=3)
    assert copies["bytes_per_s"] == max(copies["all"].values()) > 1e8


@pytest.mark.parametrize(("device", "latency", "calls"), [("cpu", 0.0, 1), ("cuda", 2.0, AT_ONCE)])
def test_the_time_of_one_call(device: str, latency: float, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a launch's latency counts once for many."""
    clock, ran = [0.0], [0]

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None:
            self.at = clock[0]
            clock[0] += latency / 2

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: Event) -> float:
            return 1000 * (end.at - self.at)

    def run() -> None:
        clock[0] += 4.0
        ran[0] += 1

    monkeypatch.setattr("hemiola.bench.machine.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("torch.cuda.Event", Event)
    seconds = _seconds(run, torch.device(device), repeats=3)
    assert ran == [4 * calls]
    assert seconds == pytest.approx(4.0 + latency / 2 / calls)


def test_reading_is_measured_in_bytes_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hemiola.bench.machine._seconds", lambda run, device, repeats: 0.5)
    assert read_bandwidth(torch.device("cpu"), 1 << 20)["bytes_per_s"] == 2 << 20


def test_a_longer_run_that_took_no_longer_gives_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(driver: Driver, prompts: list[list[int]], num_output: int) -> Run:
        return Run(2.0 if num_output == SHORT_OUTPUT else 1.5, 0.1, [])

    monkeypatch.setattr(Driver, "run", run)
    driver = Driver(SimpleNamespace(vocab_size=100), lambda: None)  # type: ignore[arg-type]
    with pytest.raises(WindowError, match=r"negative or empty.*-125, -125 ms per step.*--steps"):
        measure(driver, cell("decode", "1x8", 4), repeats=2)


def test_a_cell_without_a_figure_is_told_and_ends_in_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The rest of the run is reported; the cell is VOID in the records."""

    def refuse(driver: Driver, cell: Cell, repeats: int) -> dict[str, Any]:
        if cell.batch == 1:
            raise WindowError("the decode window is negative")
        return measure(driver, cell, repeats)

    def observed(command: list[str], *others: object) -> Observation:
        values = json.loads(command[-1])
        cells = tuple(Cell(**values) for values in values["cells"])
        options = BenchOptions(values["model"], values["synthetic"], cells, 1, settings=values["settings"])
        return Observation(run_bench(options))

    monkeypatch.setattr("hemiola.bench.run.measure", refuse)
    monkeypatch.setattr("hemiola.bench.observe", observed)
    file = tmp_path / "bench.json"
    result = CliRunner().invoke(
        app,
        ["bench", "--synthetic", "lightning-30b-tiny", *SMALL, "--record", str(tmp_path), "--json", str(file)],
    )
    assert result.exit_code == FAILED, result.output
    assert "NO FIGURE decode 1 x 24: the decode window is negative" in result.stderr
    assert "UNGATED decode 3 x 8" in result.stderr
    marks = [list(record.claim.marks) for record in read(tmp_path).records]
    assert marks == [["UNGATED", "VOID"], ["UNGATED"], ["UNGATED"]]
    assert read(tmp_path).records[0].claim.figures == []


def test_what_is_loaded_is_left_alone_while_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full garbage collection would stop a step: the measured process has none of what it has loaded."""
    order: list[str] = []

    def run(options: Any, imports_s: float, emit: Any, settle: Any) -> dict[str, Any]:
        settle()
        order.append("measured")
        return {}

    monkeypatch.setattr(process, "run_bench", run)
    monkeypatch.setattr("gc.freeze", lambda: order.append("frozen"))
    monkeypatch.setattr("sys.argv", ["bench", json.dumps({"spawned_s": 0.0, "cells": []})])
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert process.main() == 0
    assert order == ["frozen", "measured"]
