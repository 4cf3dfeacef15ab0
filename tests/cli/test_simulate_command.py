from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hemiola.cli import app
from tests.support.variants import public


def simulate(*words: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, ["simulate", *words], input=stdin, env={"COLUMNS": "120"})


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(public("nano-3-30b-a3b")))
    return str(file)


@pytest.fixture
def trace_file(tmp_path: Path) -> str:
    file = tmp_path / "trace.jsonl"
    file.write_text(simulate("--generate", "chat", "--num-requests", "24", "--seed", "3").stdout)
    return str(file)


def report(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    values: dict[str, Any] = json.loads(result.stdout)
    return values


def test_a_30b_without_its_weights(config_file: str, trace_file: str) -> None:
    words = (trace_file, "--config", config_file, "--cache-bytes", "20GiB", "--snapshot-bytes", "10GiB", "--json", "-")
    values = report(simulate(*words))
    assert values["model"]["state_bytes"] == 49_082_368
    assert values["model"]["kv_bytes_per_token"] == 6_144
    assert values["outcomes"] == {"finished": 24, "aborted": 0, "refused": 0}
    assert values["prefix"]["cached_share"] > 0.7
    assert report(simulate(*words)) == values
    fp8 = report(simulate(*words, "--kv-cache-dtype", "fp8"))
    assert fp8["model"]["kv_bytes_per_token"] == 3_072
    off = report(simulate(*words, "--no-prefix-caching"))
    assert off["prefix"]["misses"] == {"disabled": 24}


def test_a_declared_fp8_cache_is_followed(tmp_path: Path, trace_file: str) -> None:
    file = tmp_path / "fp8.json"
    scheme = {"num_bits": 8, "type": "float", "dynamic": False}
    quantization = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": scheme}
    file.write_text(json.dumps(public("nano-3-30b-a3b", quantization_config=quantization)))
    assert report(simulate(trace_file, "--config", str(file), "--json", "-"))["model"]["kv_bytes_per_token"] == 3_072


def test_a_checkpoint_by_its_headers(tiny_folder: Callable[..., Path], trace_file: str) -> None:
    values = report(simulate(trace_file, "--model", str(tiny_folder("M*E-")), "--json", "-"))
    assert values["model"]["pattern"] == "M*E-"
    assert values["settings"]["max_model_len"] == 4096


def test_files_and_a_table(config_file: str, trace_file: str, tmp_path: Path) -> None:
    cost, out, plot = tmp_path / "cost.json", tmp_path / "out.json", tmp_path / "plot.svg"
    cost.write_text('{"fixed_s": 0.5}')
    words = ("--config", config_file, "--cost", str(cost), "--json", str(out), "--plot", str(plot))
    result = simulate("-", *words, stdin=Path(trace_file).read_text())
    assert result.exit_code == 0, result.stderr
    assert "24 requests: 24 finished" in result.stdout
    assert "cost model: fixed_s 0.5, decode_row_s 5e-05" in result.stdout
    values = json.loads(out.read_text())
    assert values["cost"]["fixed_s"] == 0.5
    assert values["times_s"]["first_token"]["p50"] > 0.5
    assert plot.read_text().startswith("<svg ")


def test_generated_traces_repeat() -> None:
    words = ("--generate", "shared-prefix", "--num-requests", "3", "--num-prefixes", "1", "--shared-tokens", "9")
    lines = simulate(*words).stdout.splitlines()
    assert [json.loads(line)["prompt"][0] for line in lines] == [["system 0", 9]] * 3
    assert simulate(*words).stdout.splitlines() == lines


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "error: no trace; expected a file, - for standard input, or --generate"),
        (("none.jsonl",), "error: none.jsonl: cannot be read"),
        (("--generate", "poisson", "TRACE"), "error: --generate only writes a trace; found TRACE"),
        (
            ("--generate", "poisson", "--swap-bytes", "0", "--no-prefix-caching", "--json", "-"),
            "error: --generate only writes a trace; found --json, --no-prefix-caching, --swap-bytes",
        ),
        (("--generate", "poisson", "--num-turns", "2"), "error: num_turns: a poisson trace does not use it"),
        (("--generate", "poison"), "error: --generate: unknown kind of trace; found 'poison'"),
        (("x", "--num-turns", "2"), "error: these options are for --generate; found --num-turns"),
        (("x", "--config", "c", "--model", "m"), "error: one model too many"),
    ],
)
def test_a_mistake_is_one_sentence(words: tuple[str, ...], message: str) -> None:
    result = simulate(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("trace", "cost", "message"),
    [
        ('{"time_s": 1}', "{}", "error: standard input line 1: missing; expected the key prompt"),
        ("\n\n{", "{}", "error: standard input line 3: not valid JSON"),
        ('{"time_s": 1, "prompt": [1], "output_tokens": 1}', "{", "not valid JSON"),
        ('{"time_s": 1, "prompt": [1], "output_tokens": 1}', '{"speed": 1}', "unknown key; found speed"),
    ],
)
def test_a_mistake_in_a_file_is_told(config_file: str, tmp_path: Path, trace: str, cost: str, message: str) -> None:
    (tmp_path / "cost.json").write_text(cost)
    result = simulate("-", "--config", config_file, "--cost", str(tmp_path / "cost.json"), stdin=trace)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
