"""--record of `hemiola gate` and `hemiola bench`, end to end: a gate is recorded, and a speed rests on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from hemiola.bench import source_facts
from hemiola.cli import app
from hemiola.cli.ending import FAILED, REFUSED
from hemiola.evidence import Golden
from hemiola.evidence.identity import checkpoint_digest
from hemiola.evidence.records import append, read
from hemiola.loading import open_manifest
from hemiola.synthetic import write_checkpoint
from tests.support.claims import bench_claim

NAME = "lightning-30b-tiny"
SMALL = ["--batch", "2x8", "--steps", "64", "--repeats", "1", "--arms", "reference"]
CLEAN = "12345678" * 5


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synthetic") / "model"
    write_checkpoint(NAME, folder)
    return folder


@pytest.fixture(scope="module")
def golden(model: Path) -> Path:
    ids, file = model.parent / "ids.json", model.parent / "golden.json"
    ids.write_text(json.dumps([[5, 7, 11], list(range(20, 60))]))
    result = run("golden", model, file, "--prompt-ids", ids, "--max-tokens", 4, "--kv-cache-dtype", "model")
    assert result.exit_code == 0, result.output
    return file


def test_a_speed_rests_on_the_gate_of_its_commit_and_engine(
    model: Path, golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hemiola.bench.machine.commit", lambda: CLEAN)
    monkeypatch.setattr("hemiola.evidence.gating.MIN_POSITIONS", 8)
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))  # of the measured process, as in this one
    gated = run("gate", model, golden, "--arms", "reference", "--kv-cache-dtype", "model", "--record", tmp_path)
    assert gated.exit_code == 0, gated.output
    (gate,) = read(tmp_path).records
    assert f"recorded: {gate.id}" in gated.stdout
    claim = gate.claim
    assert claim.verdict in ("STRICT PASS", "NOISE PASS")
    assert claim.source == {"commit": CLEAN, "is_dirty": False, "sha256": source_facts()["sha256"]}
    assert claim.model["checkpoint_sha256"] == checkpoint_digest(open_manifest(model)[2].checkpoint)
    assert claim.workload["positions"] == {"decode": 8, "prefill": 8}
    assert claim.workload["golden_sha256"] == Golden.read(golden).sha256
    assert sum(path["calls"] for path in claim.paths if path["arm"] == "reference") > 0
    assert claim.figures[0].name == "decode: tokens equal"
    assert (claim.figures[0].value, claim.figures[0].unit) == (8, "of 8")

    drawn = run("bench", "--synthetic", NAME, *SMALL, "--record", tmp_path)
    assert drawn.exit_code == 0, drawn.output
    document = json.loads(drawn.stdout)
    assert document["gate"].startswith(f"gated by {gate.id} ({claim.verdict}) on model: other shapes")
    first = read(tmp_path).records[-1]
    assert (first.claim.gated_by, first.claim.marks) == ([gate.id], {})
    assert first.claim.paths == document["paths"]["calls"]

    own = run("bench", "--model", model, *SMALL, "--record", tmp_path, "--against", first.id)
    assert own.exit_code == 0, own.output
    document = json.loads(own.stdout)
    assert document["gate"].endswith("on model: this checkpoint")
    assert [line.partition(",")[0] for line in document["compared"]] == [f"against {first.id} (the same engine)"]
    assert "time to first token: " in document["compared"][0], "the only figure with more than one sample"


def test_a_red_gate_is_recorded_too(model: Path, golden: Path, tmp_path: Path) -> None:
    document = json.loads(golden.read_text())
    row = document["items"][0]["decode_top"][1]
    row[0][0], row[1][0] = row[1][0], row[0][0]
    document["items"][0]["output_ids"][1] = row[0][0]
    wrong = tmp_path / "golden.json"
    wrong.write_text(json.dumps(document))
    result = run("gate", model, wrong, "--arms", "reference", "--kv-cache-dtype", "model", "--record", tmp_path)
    assert result.exit_code == FAILED, result.output
    assert read(tmp_path).records[0].claim.verdict == "DIVERGENCE"


def test_sources_that_change_while_they_run_are_not_recorded(
    model: Path, golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is recorded is of the sources before; where they are others afterwards, nothing is."""
    monkeypatch.setattr("hemiola.cli.recording.source_facts", lambda: {"sha256": "2"})
    ids = model.parent / "trace.json"
    ids.write_text("[[5, 7, 11, 13]]")
    for command in (
        ("gate", model, golden, "--arms", "reference", "--kv-cache-dtype", "model"),
        ("bench", "--synthetic", NAME, *SMALL),
        ("trace", model, model, "--dtype-b", "float32", "--prompt-ids", ids, "--max-tokens", 1),
    ):
        result = run(*command, "--record", tmp_path)
        assert result.exit_code == REFUSED
        assert "the sources changed while they ran; found 2" in " ".join(result.stderr.split())
    assert not list(tmp_path.iterdir())


def test_what_is_to_be_compared_with_has_to_be_there(tmp_path: Path) -> None:
    result = run("bench", "--synthetic", NAME, *SMALL, "--against", "abc")
    assert result.exit_code == REFUSED
    assert "expected --record" in result.stderr
    append(tmp_path, bench_claim())
    result = run("bench", "--synthetic", NAME, *SMALL, "--record", tmp_path, "--against", "abc")
    assert result.exit_code == REFUSED
    assert "no such record; found abc" in result.stderr
    assert len(read(tmp_path).records) == 1, "refused before anything ran"


def test_a_trace_is_recorded(model: Path, tmp_path: Path) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text("[[5, 7, 11, 13]]")
    sides = [
        model,
        model,
        "--arms-a",
        "reference",
        "--arms-b",
        "reference",
        "--dtype-a",
        "float32",
        "--dtype-b",
        "bf16",
    ]
    result = run("trace", *sides, "--prompt-ids", ids, "--max-tokens", 1, "--record", tmp_path)
    (record,) = read(tmp_path).records
    claim = record.claim
    assert f"recorded: {record.id}" in result.stdout
    assert (claim.kind, claim.model["name"], claim.marks) == ("trace", model.name, {})
    assert claim.verdict in result.stdout
    assert claim.workload["prompt_tokens"] == 4
    assert claim.figures[0].value == sum(len(layer["values"]) for layer in claim.more["trace"]["layers"])
    assert {path["side"] for path in claim.paths} == {"a", "b"}
    report = run("report", tmp_path, "--markdown", tmp_path / "report.md", "-o", tmp_path / "report.html")
    assert report.exit_code == 0, report.output
    assert claim.verdict.replace("_", "\\_") in (tmp_path / "report.md").read_text()
