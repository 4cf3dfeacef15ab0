from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hemiola import LLM, SamplingParams
from hemiola.cli import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


def test_it_writes_a_checkpoint_that_runs(text_folder: Path, tmp_path: Path) -> None:
    text, target = tmp_path / "text.txt", tmp_path / "quantised"
    text.write_text("bada fu kan zi do re mi " * 40)
    options = ("--calibration-tokens", 100, "--calibration-window", 20)
    result = run(text_folder, target, "--scheme", "lightning", "--calibrate", text, *options)
    assert result.exit_code == 0, result.stderr
    assert "FP8 modules" in result.stdout
    assert "calibrated on 100 tokens" in result.stdout
    assert (
        len(LLM(target).generate([[5, 6]], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3
    )


@pytest.mark.parametrize(
    ("scheme", "calibration", "message"),
    [("int3", "text.txt", "int3"), ("fp8", "none.txt", "none.txt"), ("fp8", "empty.txt", "empty.txt")],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(
    tiny_folder: Callable[..., Path], tmp_path: Path, scheme: str, calibration: str, message: str
) -> None:
    (tmp_path / "text.txt").write_text("bada fu")
    (tmp_path / "empty.txt").write_text("")
    target = tmp_path / "quantised"
    result = run(tiny_folder("M*E-"), target, "--scheme", scheme, "--calibrate", tmp_path / calibration)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not target.exists()
