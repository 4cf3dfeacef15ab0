"""Legs: what is a difference, what is none, what is void, in which order they run; and the command, with processes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from hemiola import LLM
from hemiola.cli import app
from hemiola.cli.ending import FAILED, REFUSED
from hemiola.evidence import MODES, EvidenceError, capture
from hemiola.evidence.gating import MIN_POSITIONS
from hemiola.evidence.legs import Gated, Leg, LegRun, LegsResult, Processes, read_run, run_legs
from hemiola.evidence.records import Claim, read

A = Leg("a", "device", "device")
B = Leg("b", {"*": "device", "mamba2_update": "reference"}, "device,mamba2_update=reference")
CELL = "decode 1 x 128"


def green(record: str = "0123456789ab", positions: int = MIN_POSITIONS) -> Gated:
    modes = [{"mode": mode, "positions": positions} for mode in MODES]
    return Gated("NOISE PASS", document={"modes": modes, "record": record})


GREEN = green()


def document(ms: float, mamba2_update: str = "device", **changes: Any) -> dict[str, Any]:
    """As `hemiola bench` writes it. changes: busy, unsteady, graphs, device, reason, more calls."""
    paths = [("linear", "device", ""), ("mamba2_update", mamba2_update, changes.get("reason", ""))]
    return {
        "paths": {
            "calls": [
                {"op": op, "arm": arm, "variant": "v", "reason": reason, "calls": 7}
                for op, arm, reason in [*paths, *changes.get("calls", [])]
            ]
        },
        "memory": {"graph_capture_s": changes.get("graphs", 0.5)},
        "conditions": {
            "device": {"type": "cuda", "name": changes.get("device", "H200"), "driver": "580"},
            "versions": {"torch": "2.11.0"},
        },
        "cells": [
            {
                "cell": CELL,
                "kind": "decode",
                "ms_per_step": ms,
                "nvml": {"busy": changes.get("busy", 0.9), "unsteady": changes.get("unsteady", "")},
            },
            {"cell": "prefill 1 x 8", "kind": "prefill", "seconds": ms / 10},
        ],
    }


def measured(times: Mapping[str, list[float]], arms: Mapping[str, str], **changes: Any) -> LegsResult:
    """Legs a and b with these times by repeat; changes: of the documents of b."""

    def measure(leg: Leg, repeat: int) -> LegRun:
        own = changes if leg.name == "b" else {}
        return read_run(leg, repeat, document(times[leg.name][repeat], arms[leg.name], **own))

    return run_legs("model", [A, B], len(times["a"]), measure, lambda leg: GREEN)


def claim_of(result: LegsResult, is_dirty: bool = False) -> Claim:
    return result.claim(["hemiola", "legs"], {"commit": "1", "is_dirty": is_dirty})


ARMS = {"a": "device", "b": "reference"}


def test_a_difference_of_one_sign() -> None:
    result = measured({"a": [1.0, 1.1, 1.0], "b": [1.5, 1.4, 1.6]}, ARMS)
    decode, prefill = result.differences()
    assert (decode.verdict, prefill.verdict) == ("slower", "slower")
    assert decode.deltas_ms == pytest.approx([0.5, 0.3, 0.6])
    assert decode.ratio == pytest.approx(1.5)
    assert [run.leg for run in result.runs] == list("abbaab"), "the order turns round"
    lines = list(result.lines())
    assert any("b against a, decode 1 x 128: slower by +0.500 ms, 1.500 times" in line for line in lines)
    assert any(line.split()[:8] == f"{CELL} b 3 1.500 1.400".split() for line in lines)
    assert any("90.0%  NOISE PASS" in line for line in lines)
    assert not result.is_red
    claim = claim_of(result)
    assert (claim.machine["device"], claim.machine["driver"], claim.marks) == ("H200", "580", {})
    assert [figure.value for figure in claim.figures if figure.name == f"leg b, {CELL}"] == [1.5]
    assert "b against a" in claim.verdict
    assert claim.gated_by == ["0123456789ab"] * 2
    assert (
        measured({"a": [2.0, 2.0, 2.1], "b": [1.0, 1.9, 1.5]}, ARMS).as_dict()["differences"][0]["verdict"] == "faster"
    )


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ([1.5, 0.9, 1.6], "its sign changes between repeats (+0.500, -0.200, +0.400 ms)"),
        ([1.5, 1.1, 1.6], "its sign changes between repeats (+0.500, +0.000, +0.400 ms)"),
        ([1.05, 1.25, 1.3], "the times of both overlap (+0.050, +0.150, +0.100 ms)"),
    ],
)
def test_a_difference_that_is_not_of_one_sign_or_not_apart_is_none(own: list[float], why: str) -> None:
    difference = next(measured({"a": [1.0, 1.1, 1.2], "b": own}, ARMS).differences())
    assert difference.verdict == "no difference"
    assert difference.line().endswith(why)
    assert "times (" not in difference.line()


@pytest.mark.parametrize(
    ("arms", "changes", "why"),
    [
        ("device", {}, "mamba2_update on the device arm"),
        ("reference", {"reason": "no variant"}, "fell back"),
        ("reference", {"calls": [("embedding", "reference", "")]}, "embedding on the reference arm"),
    ],
)
def test_a_leg_that_does_not_prove_its_arms_is_void(arms: str, changes: dict[str, Any], why: str) -> None:
    result = measured({"a": [1.0, 1.0], "b": [2.0, 2.0]}, {"a": "device", "b": arms}, **changes)
    assert why in result.void("b")
    assert not result.void("a")
    assert result.is_red
    assert {d.verdict for d in result.differences()} == {"declined"}
    assert not result.of("b", CELL)
    assert any(line.startswith("leg b, device,mamba2_update=reference: VOID") for line in result.lines())
    assert why in claim_of(result).marks["VOID"]
    assert {figure.name for figure in claim_of(result).figures} == {f"leg a, {CELL}", "leg a, prefill 1 x 8"}


def test_a_leg_that_moves_what_does_not_run_is_void() -> None:
    idle = Leg("b", {"*": "device", "linear_fp8": "reference"}, "device,linear_fp8=reference")
    assert "no call of linear_fp8 was counted" in read_run(idle, 0, document(1.0)).void


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"graphs": 0.0}, "run both with --no-cuda-graphs"),
        ({"device": "H100"}, "machine is not the same"),
        ({"unsteady": "the clock fell"}, "unsteady machine (the clock fell)"),
    ],
)
def test_what_differs_in_more_than_arms_is_not_compared(changes: dict[str, Any], why: str) -> None:
    difference = next(measured({"a": [1.0] * 3, "b": [2.0] * 3}, ARMS, **changes).differences())
    assert difference.verdict == "declined"
    assert why in difference.declined


def test_two_repeats_are_no_difference_yet() -> None:
    assert next(measured({"a": [1.0] * 2, "b": [2.0] * 2}, ARMS).differences()).declined == "2 of at least 3 repeats"


def test_verdicts_stand_beside_the_legs() -> None:
    def measure(leg: Leg, repeat: int) -> LegRun:
        return read_run(leg, repeat, document(1.0, ARMS[leg.name], busy=None))

    gates = {"a": GREEN, "b": Gated("DIVERGENCE")}
    red = run_legs("model", [A, B], 2, measure, lambda leg: gates[leg.name])
    assert red.is_red
    assert any(line.endswith("-  DIVERGENCE") for line in red.lines())
    assert run_legs("model", [A, B], 2, measure, lambda leg: Gated("NO VERDICT", "why")).is_red
    ungated = run_legs("model", [A, B], 2, measure, Processes(["--model", "m"], None).gate)
    assert not ungated.is_red
    assert claim_of(ungated).marks["UNGATED"] == "leg a: no golden was given; leg b: no golden was given"
    red = run_legs("model", [A, B], 2, measure, lambda leg: Gated("DIVERGENCE") if leg is B else GREEN)
    assert claim_of(red).marks["UNGATED"] == "leg b: DIVERGENCE"
    for legs in ([A], [A, A], []):
        with pytest.raises(EvidenceError, match="two or more"):
            run_legs("model", legs, 1, measure, lambda leg: GREEN)


def test_what_a_speed_of_legs_rests_on() -> None:
    """The records of the legs' own gates, where they are green, of enough positions, and of a clean tree."""

    def claim(b: Gated, is_dirty: bool = False) -> Claim:
        gates = {"a": green("a" * 12), "b": b}
        result = run_legs(
            "model",
            [A, B],
            2,
            lambda leg, repeat: read_run(leg, repeat, document(1.0, ARMS[leg.name])),
            lambda leg: gates[leg.name],
        )
        return claim_of(result, is_dirty)

    both = claim(green("b" * 12))
    assert (both.gated_by, both.marks) == (["a" * 12, "b" * 12], {})
    dirty = claim(green("b" * 12), is_dirty=True)
    assert (dirty.gated_by, dirty.marks) == ([], {"UNGATED": "the tree is dirty, a gate is of one commit"})
    few = claim(green("b" * 12, positions=99))
    assert few.gated_by == ["a" * 12]
    why = "leg b: its gate is with fewer than 100 positions (99 in decode, 99 in prefill)"
    assert few.marks == {"UNGATED": why}
    unrecorded = Gated("STRICT PASS", document={"modes": GREEN.document["modes"]})
    assert claim(unrecorded).marks == {"UNGATED": "leg b: its gate is not recorded"}


def test_processes_get_the_same_but_for_the_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        commands.append(command[3:-1])  # without the interpreter and the file of this call
        return SimpleNamespace(returncode=2, stderr="first\nnote\nerror: the reason\n")

    monkeypatch.setattr(subprocess, "run", run)
    processes = Processes(
        ["--model", "m"], Path("g.json"), ["--dtype", "bf16"], ["--batch", "1"], ["--max-num-seqs", "9"]
    )
    run_a, gate_a = processes.measure(A, 0), processes.gate(A)
    assert run_a.void == "hemiola bench ended with status 2: note; error: the reason"
    assert (gate_a.verdict, gate_a.why) == ("NO VERDICT", "status 2: note; error: the reason")
    processes.measure(B, 1)
    bench = ["bench", "--model", "m", "--batch", "1", "--dtype", "bf16", "--arms", "device", "--json"]
    assert commands[0] == bench
    assert commands[1] == [
        "gate",
        "m",
        "g.json",
        "--max-num-seqs",
        "9",
        "--dtype",
        "bf16",
        "--arms",
        "device",
        "--json",
    ]
    assert commands[2] == [word if word != "device" else B.given for word in bench]


@pytest.mark.slow
def test_the_command(tiny_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two legs alike, which are controls of each other, and one that cannot run here."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    folder = tiny_folder("ME*-")
    golden, out = tmp_path / "golden.json", tmp_path / "legs.json"
    llm = LLM(folder, arms="reference", cache_bytes=16 << 20, max_model_len=256)
    capture(llm, [[5, 7, 11], [3]], max_tokens=50).write(golden)
    command = ["legs", "--model", str(folder), "--golden", str(golden), "--json", str(out), "--repeats", "2"]
    command += ["--batch", "1x16", "--prefill", "1x32", "--steps", "32"]
    arms = ["--leg", "a=reference", "--leg", "b=reference"]
    command += ["--record", str(tmp_path)]
    result = CliRunner().invoke(app, [*command, *arms, "--leg", "c=device"])
    assert result.exit_code == FAILED, result.output
    found = json.loads(out.read_text())
    assert found["order"] == list("abccba")
    a, b, c = found["legs"]
    assert (a["gate"], b["gate"], c["gate"]) == ("STRICT PASS", "STRICT PASS", "NO VERDICT")
    assert (a["void"], "no GPU for the device arm" in c["void"], c["cells"]) == ("", True, {})
    assert a["cells"]["decode 1 x 16"]["n"] == 2
    assert 0 < a["cells"]["decode 1 x 16"]["median"] < 100
    assert {call["arm"] for call in a["paths"]} == {"reference"}
    assert {d["verdict"] for d in found["differences"]} == {"declined"}, "of two repeats"
    assert "controls of each other: a, b" in result.stdout
    assert "leg c, device: VOID" in result.stdout
    gates, legs = read(tmp_path).records[:-1], read(tmp_path).records[-1]
    assert [(gate.claim.kind, gate.claim.verdict) for gate in gates] == [("gate", "STRICT PASS")] * 2
    assert legs.claim.kind == "legs"
    assert legs.claim.gated_by == ([] if legs.claim.source["is_dirty"] else [gate.id for gate in gates])
    assert sorted(legs.claim.marks) == ["UNGATED", "VOID"]
    assert "leg a, decode 1 x 16" in {figure.name for figure in legs.claim.figures}


def test_what_the_command_refuses() -> None:
    for options in (
        ["--leg", "device", "--leg", "b=device"],
        ["--leg", "a=reference"],
        ["--leg", "a=reference", "--leg", "b=reference", "--synthetic", "lightning-30b-tiny", "--golden", "g.json"],
    ):
        assert CliRunner().invoke(app, ["legs", *options]).exit_code == REFUSED
