from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner

from hemiola.cli import app
from hemiola.inspect import build_report, to_json
from hemiola.loading import open_manifest


def test_json_is_the_whole_report(seeded_checkpoint: Callable[[str], Path]) -> None:
    folder = seeded_checkpoint("lightning")
    result = CliRunner().invoke(app, ["inspect", str(folder), "--json"])
    assert result.exit_code == 0
    _, config, manifest = open_manifest(folder)
    assert json.loads(result.stdout) == json.loads(json.dumps(to_json(build_report(manifest, config))))


def test_a_table_for_people(seeded_checkpoint: Callable[[str], Path]) -> None:
    folder = str(seeded_checkpoint("lightning"))
    short = CliRunner().invoke(app, ["inspect", folder], env={"COLUMNS": "200"}).stdout
    assert "MEM*EM-MEM*E" in short
    assert "routed experts" in short
    assert "backbone.layers.0.mixer.in_proj" not in short
    long = CliRunner().invoke(app, ["inspect", folder, "--modules"], env={"COLUMNS": "200"}).stdout
    assert "backbone.layers.0.mixer.in_proj" in long


def test_a_mistake_is_one_sentence(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "none")])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {tmp_path / 'none'}: no such model folder")
    assert result.stderr.count("\n") == 1
