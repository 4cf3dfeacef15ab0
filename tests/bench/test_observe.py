"""The observer of a measured process, end to end with a fake NVML and a fake process: what lies in the window counts.

The process writes its phase to a file, and NVML's utilisation follows it: 4 % while loading, 40 % in prefill, 97 %
while decoding.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from hemiola.bench import MeasuredProcessError, Nvml, observe
from hemiola.bench.machine import Sample, source_facts, versions
from hemiola.bench.observe import LOOK_BACK_S, Observation, busy_in
from hemiola.bench.window import Span, WindowError
from hemiola.cli import app
from hemiola.cli.bench import judged, show
from hemiola.evidence.records import append, read
from tests.support.claims import MACHINE, PATHS, SOURCE, gate_claim

PROGRAM = """
import json, pathlib, sys, time
phase_file, what = pathlib.Path(sys.argv[1]), sys.argv[2]
def tell(**event):
    print(json.dumps(event), flush=True)
def phase(name, seconds):
    tell(event="begin", phase=name, at_s=time.monotonic())
    phase_file.write_text(name)
    time.sleep(seconds)
    if name == what:
        DEATH
    tell(event="end", phase=name, at_s=time.monotonic())
print("a library says hello")
tell(event="gpu", address="00000000:3b:00.0")
phase("load", 0.3)
phase("prefill", 0.1)
phase("decode", 0.7)
tell(event="document", document={"cells": []})
"""
BUSY = {"load": 4, "prefill": 40, "decode": 97}


class NVMLError(Exception):
    pass


@pytest.fixture
def phase_file(tmp_path: Path) -> Path:
    file = tmp_path / "phase"
    file.write_text("load")
    return file


@pytest.fixture
def nvml(phase_file: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A fake pynvml. Its `state` may be changed: clock (of a reading's number while decoding), throttle."""
    state = SimpleNamespace(clock=lambda reading: 1980, throttle=0, opened=[], readings=0)
    module: Any = ModuleType("pynvml")
    module.NVMLError = NVMLError
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetHandleByPciBusId = lambda address: state.opened.append(address) or "handle"

    def utilisation(handle: str) -> SimpleNamespace:
        phase = phase_file.read_text() or "load"  # empty while it is written
        state.readings += phase == "decode"
        return SimpleNamespace(gpu=BUSY[phase])

    module.nvmlDeviceGetUtilizationRates = utilisation
    module.nvmlDeviceGetClockInfo = lambda handle, kind: state.clock(state.readings)
    module.nvmlDeviceGetPowerUsage = lambda handle: 512_000
    module.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: state.throttle
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return state


def watched(phase_file: Path, dies_in: str = "", death: str = "sys.exit(3)") -> Observation:
    program = PROGRAM.replace("DEATH", death)
    return observe([sys.executable, "-S", "-c", program, str(phase_file), dies_in], Nvml)


def test_only_the_decode_window_counts(nvml: SimpleNamespace, phase_file: Path) -> None:
    seen = watched(phase_file)
    busy = seen.busy(0)
    assert nvml.opened == [b"00000000:3b:00.0"]
    assert min(sample.busy for sample in seen.samples) == 4, "it was watched while it loaded, too"
    assert (busy["busy"], busy["busy_min"], busy["unsteady"]) == (0.97, 0.97, "")
    assert 5 <= busy["samples"] < len(seen.samples)
    assert 0.69 < busy["window_s"] < 1.2
    assert busy["clock_mhz"] == {"start": 1980, "min": 1980, "median": 1980, "max": 1980}
    assert (busy["power_w"], busy["throttle"]) == ({"mean": 512.0, "max": 512.0}, {})
    with pytest.raises(WindowError, match="no such decode window"):
        seen.busy(1)


@pytest.mark.parametrize(
    ("dies_in", "death", "status"),
    [
        ("load", "sys.exit(3)", 3),
        ("decode", "sys.exit(1)", 1),
        ("load", f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})", 137),
    ],
)
def test_a_process_that_dies_gives_no_figure_and_its_status(
    nvml: SimpleNamespace, phase_file: Path, dies_in: str, death: str, status: int
) -> None:
    with pytest.raises(MeasuredProcessError, match=f"NO FIGURE.*status {status}, in {dies_in}") as caught:
        watched(phase_file, dies_in, death)
    assert caught.value.status == status


def test_a_process_that_dies_while_it_writes_gives_no_figure_and_its_status() -> None:
    program = """import sys; print('{"event": "document", "document": {"cel', end="", flush=True); sys.exit(9)"""
    with pytest.raises(MeasuredProcessError) as error:
        observe([sys.executable, "-c", program], lambda address: Nvml(address))
    assert error.value.status == 9


def test_a_process_that_ends_well_without_a_document_gives_none_either() -> None:
    with pytest.raises(MeasuredProcessError, match="status 0, in what comes before its first phase"):
        observe([sys.executable, "-S", "-c", "pass"], Nvml)


def test_the_command_ends_with_the_status_of_the_process_and_records_that(
    monkeypatch: pytest.MonkeyPatch, phase_file: Path, tmp_path: Path
) -> None:
    program = PROGRAM.replace("DEATH", "sys.exit(41)")
    command = [sys.executable, "-S", "-c", program, str(phase_file), "load"]
    monkeypatch.setattr("hemiola.bench.command_of", lambda options: command)
    arguments = ["bench", "--synthetic", "lightning-30b-tiny", "--record", str(tmp_path / "r")]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (41, "")
    assert "NO FIGURE: the measured process ended; found status 41, in load" in result.stderr
    (record,) = read(tmp_path / "r").records
    assert list(record.claim.marks) == ["VOID"]
    assert not record.claim.figures


def test_a_clock_that_drops_makes_the_record_unsteady(
    nvml: SimpleNamespace, phase_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nvml.clock = lambda reading: 1980 if reading < 15 else 660
    seen = watched(phase_file)
    seen.document = document()
    append(tmp_path, gate_claim())
    (row,) = judged(seen, source(), tmp_path, ())["cells"]
    assert row["nvml"]["unsteady"] == "the SM clock was between 660 and 1980 MHz"
    record = read(tmp_path).records[-1]
    assert record.claim.marks["UNSTEADY"] == row["nvml"]["unsteady"]
    assert record.claim.machine["clock_mhz"]["min"] == 660
    assert "UNSTEADY decode 2 x 8: the SM clock" in shown(judged(seen, source(), tmp_path, ()), capsys)
    again = judged(seen, source(), tmp_path, [record])
    assert [line.partition(": ")[2] for line in again["compared"]] == ["clock state is unsteady"]


def test_what_slows_the_clocks_makes_it_unsteady(nvml: SimpleNamespace, phase_file: Path) -> None:
    nvml.throttle = 0x4 | 0x1
    busy = watched(phase_file).busy(0)
    assert busy["throttle"] == {"power cap": busy["samples"]}
    assert busy["unsteady"] == f"power cap in {busy['samples']} of {busy['samples']} samples"


def source() -> dict[str, Any]:
    """These sources, of a clean tree."""
    return {**SOURCE, "sha256": source_facts()["sha256"]}


def document() -> dict[str, Any]:
    """Of a cell whose window is the fake process's first one."""
    claim = gate_claim()
    row = {
        "cell": "decode 2 x 8",
        "kind": "decode",
        "batch": 2,
        "prompt_tokens": 8,
        "output_tokens": [16, 20],
        "ms_per_step": 4.0,
        "tokens_per_s": 500.0,
        "samples_ms": [4.0, 4.1],
        "first_token_s": 0.01,
        "samples_first_token_s": [0.01],
        "bytes_per_step": {"total": 1000},
        "fraction_of_copy": 0.5,
        "window": {"number": 0, "steps": 100, "ms_per_step": 4.0},
    }
    return {
        "model": claim.model,
        "engine": dict(claim.engine) | {"prefix_caching": False},
        "paths": {"calls": PATHS, "verdict": "no call ran on the reference arm"},
        "start_s": {"weights": 2.0, "together": 2.0},
        "memory": {"weights_resident": 1_000_000_000},
        "copy": {"bytes_per_s": 1e9, "way": "copy_"},
        "read": {"bytes_per_s": 2e9, "way": "read_kernel"},
        "cells": [row],
        "conditions": {
            "device": {"type": "cuda", "name": "GPU X", "driver": "580.1"},
            "versions": {"hemiola": "0", "commit": None, "torch": "2"},
            "repeats": 2,
            "seed": 1,
            "notes": [],
        },
    }


def shown(document: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    show(document)
    return capsys.readouterr().err


def test_every_line_with_a_figure_begins_with_ungated_where_nothing_vouches(
    nvml: SimpleNamespace, phase_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = watched(phase_file)
    seen.document = document()
    judged_document = judged(seen, source(), tmp_path, ())
    assert judged_document["gate"].startswith("UNGATED: ")
    assert next(iter(judged_document["cells"][0].values())).startswith("UNGATED: "), "the first word of a row"
    assert list(read(tmp_path).records[-1].claim.marks) == ["UNGATED"]
    lines = shown(judged_document, capsys).splitlines()
    figures = [line for line in lines if any(letter.isdigit() for letter in line)][1:]
    assert len(figures) >= 7
    assert all(line.startswith("UNGATED") for line in figures), "\n".join(lines)
    assert "UNGATED weights: 1.000 GB / 2.00 s = 0.50 GB/s" in lines
    assert "UNGATED memory: copy 1 GB/s (copy_), read 2 GB/s (read_kernel)" in lines
    assert "UNGATED prefill of decode 2 x 8: 2 x 8 = 16 tokens / 0.0100 s = 1,600 tokens/s" in "\n".join(lines)

    engine, machine = seen.document["engine"], {**MACHINE, "versions": versions()}
    gate = append(tmp_path, gate_claim(source=source(), engine=engine, machine=machine))
    judged_document = judged(seen, source(), tmp_path, ())
    assert judged_document["gate"].startswith(f"gated by {gate.id} (NOISE PASS) on lightning")
    assert read(tmp_path).records[-1].claim.gated_by == [gate.id]
    assert "UNGATED" not in shown(judged_document, capsys)


def samples(busy: Callable[[float], int]) -> list[Sample]:
    return [Sample(step / 50, busy(step / 50), 1980, None, None) for step in range(700)]


@pytest.mark.parametrize(
    ("window", "why"),
    [
        (Span("decode", 8.0, 13.0), "overlaps load; found 2 of 5 s"),
        (Span("decode", 10.5, 13.0), "overlaps prefill; found 0.5 of 2.5 s"),
        (Span("decode", 12.0, 12.0), "is empty"),
        (Span("decode", 13.0, 12.0), "is negative; found -1 s"),
    ],
)
def test_a_window_that_is_not_decoding_alone_is_refused(window: Span, why: str) -> None:
    others = (Span("load", 0.0, 10.0), Span("prefill", 10.0, 11.0))
    with pytest.raises(WindowError, match=why):
        busy_in(window, others, samples(lambda at: 50))


def test_a_reading_that_looks_back_before_the_window_is_left_out() -> None:
    window = Span("decode", 11.0, 13.0)
    seen = busy_in(window, (), samples(lambda at: 97 if 11 + LOOK_BACK_S <= at <= 13 else 0))
    assert seen["busy"] == 0.97
    assert seen["samples"] == 91
    short = busy_in(Span("decode", 11.0, 11.1), (), samples(lambda at: 97))
    assert (short["busy"], short["why"], short["samples"]) == (None, "the window was shorter than a sample", 0)
    assert busy_in(window, (), [], "NVML: no permission")["why"] == "NVML: no permission"


def test_nvml_that_is_missing_or_refuses_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Nvml(None).problem == "no GPU"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "not installed" in (Nvml("00000000:3b:00.0").problem or "")
    assert Nvml(None).sample() is None
