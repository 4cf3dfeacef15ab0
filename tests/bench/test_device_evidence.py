"""The command that makes a GPU's evidence: its steps can be run, keep their turns, and none fails unnoticed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.device_evidence import ALONE, Phase, Step, phases, run_phases
from hemiola.cli import app

ROOT = Path(__file__).parents[2]
STEPS = {step.name: step.arguments for phase in phases(Path("out")) for step in phase.steps}


@pytest.mark.parametrize("name", STEPS)
def test_every_step_is_a_command_with_such_options(name: str) -> None:
    module, *arguments = STEPS[name][1:]
    if module == "hemiola":
        result = CliRunner().invoke(app, [*arguments, "--help"])
        assert result.exit_code == 0, result.output
    elif module == "pytest":
        assert all((ROOT / part.partition("::")[0]).exists() for part in arguments if part.startswith("tests/"))
    else:
        command = [sys.executable, "-m", module, "--help"]
        told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert all(part in told for part in arguments if part.startswith("--"))


def test_what_the_many_tests_leave_out_runs_alone() -> None:
    tests, alone = STEPS["tests"], STEPS["tests-alone"]
    assert {tests[i + 1] for i, part in enumerate(tests) if part == "--deselect"} == set(ALONE) <= set(alone)


def test_all_records_are_in_one_folder_and_gates_come_first() -> None:
    first, second, third = phases(Path("out"))
    for step in (*first.steps[1:], *third.steps[:-1]):
        assert str(Path("out/records")) in step.arguments
    assert [step.name for step in first.steps[1:]] == ["gates", "gates-invariant"]
    assert [first.is_alone, second.is_alone, third.is_alone] == [False, True, True]


def test_a_phase_waits_for_the_one_before_and_a_gpu_has_one_step(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    say = f"""
import os, sys, time
gpu = os.environ["CUDA_VISIBLE_DEVICES"]
def note(what):
    with open({str(seen)!r}, "a") as file:
        file.write(f"{{what}} {{sys.argv[1]}} {{gpu}} {{os.environ['TRITON_CACHE_DIR'][-1]}}\\n")
note("begin"); time.sleep(0.2); print("told"); note("end"); sys.exit(int(sys.argv[2]))
"""

    def step(name: str, status: int = 0) -> Step:
        return Step(name, ("-c", say, name, str(status)))

    told: list[str] = []
    asked = [Phase((step("a"), step("b", 3), step("c"))), Phase((step("d"),))]
    done = run_phases(asked, ["4", "7"], tmp_path, told.append)
    assert {row["step"]: row["status"] for row in done} == {"a": 0, "b": 3, "c": 0, "d": 0}
    assert json.loads((tmp_path / "evidence.json").read_text()) == [
        row | {"command": [*row["command"]]} for row in done
    ]
    lines = [line.split() for line in seen.read_text().splitlines()]
    assert all(gpu == cache for _, _, gpu, cache in lines)
    assert lines[-2:] == [["begin", "d", lines[-1][2], lines[-1][2]], ["end", "d", lines[-1][2], lines[-1][2]]]
    for own in ("4", "7"):
        whats = [what for what, _, gpu, _ in lines if gpu == own]
        assert whats == ["begin", "end"] * (len(whats) // 2), "one after the other"
    assert {gpu for *_, gpu, _ in lines[:2]} == {"4", "7"}, "side by side"
    assert all((tmp_path / f"{name}.log").read_text() == "told\n" for name in "abcd")
    assert [line for line in told if "ended with 3" in line]


def test_where_nothing_is_timed_a_gpu_has_many_steps(tmp_path: Path) -> None:
    """Each begins before any ends."""
    wait = f"""
import sys, time
from pathlib import Path
folder = Path({str(tmp_path)!r})
(folder / f"begun-{{sys.argv[1]}}").touch()
until = time.monotonic() + 20
while len(list(folder.glob("begun-*"))) < 3:
    if time.monotonic() > until: sys.exit(1)
    time.sleep(0.01)
"""
    steps = tuple(Step(name, ("-c", wait, name)) for name in "abc")
    done = run_phases([Phase(steps, is_alone=False)], ["0"], tmp_path, lambda text: None)
    assert [row["status"] for row in done] == [0, 0, 0]
