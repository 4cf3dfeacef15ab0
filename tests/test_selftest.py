"""`hemiola selftest`: everything goes red that has to, and an instrument that stays green is told."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from hemiola import selftest
from hemiola.cli import app
from hemiola.cli.ending import FAILED
from hemiola.evidence import Verdict
from hemiola.selftest import Outcome

CASES = {
    ("gate", "recurrent state dropped before each decode step"),
    ("gate", "nibbles of NVFP4 weights swapped"),
    ("gate", "input_scale of FP8 products ignored"),
    ("gate", "scale of FP8 and NVFP4 weights skipped"),
    ("gate", "an arm claimed that did not run"),
    ("gate", "zero tokens"),
    ("busy sampler", "sampled over the load"),
    ("busy sampler", "the measured process dies in its load"),
    ("records", "a line changed"),
    ("comparison", "other hardware"),
}


def test_each_instrument_goes_red_when_it_is_broken() -> None:
    outcomes = list(selftest.selftest())
    wrong = [outcome for outcome in outcomes if not outcome.is_right]
    assert wrong == []
    assert {(outcome.instrument, outcome.broken) for outcome in outcomes} >= CASES
    controls = [outcome.instrument for outcome in outcomes if outcome.broken == "nothing"]
    assert sorted(controls) == sorted({outcome.instrument for outcome in outcomes}), "each has its control"


def test_a_gate_that_cannot_fail_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The instruments' own defects: a gate that passes everything, a chain whose hashes nobody looks at."""
    monkeypatch.setattr(sys.modules["hemiola.evidence.gate"], "judge", lambda figures, noise: Verdict.STRICT_PASS)
    monkeypatch.setattr("hemiola.evidence.records._sha256", lambda data: "0" * 64)
    wrong = {(o.instrument, o.broken) for o in selftest.selftest() if not o.is_right}
    assert {("gate", "zero tokens"), ("gate", "nothing"), ("records", "nothing")}.isdisjoint(wrong)
    assert {case for case in CASES if case[0] == "gate"} - {
        ("gate", "zero tokens"), ("gate", "an arm claimed that did not run"),
    } <= wrong  # fmt: skip
    assert ("records", "a line changed") in wrong


@pytest.mark.parametrize("is_right", [True, False])
def test_the_command_says_what_it_saw(monkeypatch: pytest.MonkeyPatch, is_right: bool) -> None:
    outcomes: list[Any] = [Outcome("gate", "nothing", "STRICT PASS", True), Outcome("gate", "[x]", "so", is_right)]
    monkeypatch.setattr(selftest, "selftest", lambda: iter(outcomes))
    result = CliRunner().invoke(app, ["selftest"])
    assert result.exit_code == (0 if is_right else FAILED)
    assert ("WRONG" in result.stdout) is not is_right
    assert f"{1 + is_right} of 2 as they have to be" in result.stdout
    assert "[x]" in result.stdout
