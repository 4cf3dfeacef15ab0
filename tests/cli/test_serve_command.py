"""`hemiola serve` as a process of its own: what it says when it starts, how it ends, and what it refuses."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from hemiola.cli import app
from hemiola.cli.ending import REFUSED
from tests.support.server_process import Process


@pytest.fixture
def server(text_folder: Path, request: pytest.FixtureRequest) -> Iterator[Process]:
    process = Process(text_folder, "--cache-bytes", "16MiB", *getattr(request, "param", ()))
    yield process
    process.close()


@pytest.mark.parametrize("server", [("--drain-seconds", "1")], indirect=True)
def test_sigterm_in_mid_stream_ends_it_cleanly(server: Process, text_folder: Path) -> None:
    (event,) = server.named("listening")
    assert (event["model"], event["reasoning"], event["tools"]) == (text_folder.name, True, "qwen3_coder")
    assert event["url"].startswith("http://127.0.0.1:")
    children = psutil.Process(server.process.pid).children(recursive=True)
    body = {"prompt": "bada", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
    body["max_tokens"] = httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"][0]["max_model_len"] - 100
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False) as answer:
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        begun = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert rest[-1] == "data: [DONE]"
    last = json.loads(rest[-2].removeprefix("data: "))
    assert "error" in last or last["choices"][0]["finish_reason"] == "length"
    assert server.end() == 0
    assert time.monotonic() - begun < 10
    assert not [child for child in children if child.is_running()]
    assert server.named("stopped")


def test_sigint_ends_it_as_a_shell_expects(server: Process) -> None:
    assert server.end(signal.SIGINT) in (130, -signal.SIGINT)
    assert server.named("stopped")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--port", "70000"], "port"),
        (["--max-streams", "0"], "max_streams"),
        (["--log-format", "xml"], "log_format"),
        (["--api-key-file", "/nowhere"], "/nowhere"),
        (["/nowhere"], "/nowhere"),
        (["--dtype", "int3"], "dtype"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(arguments: list[str], word: str) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == REFUSED
    assert word in result.stderr
    assert result.stderr.count("\n") == 1


def test_engine_options_are_those_of_generate() -> None:
    helps = [CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output for name in ("generate", "serve")]
    engines = [text[text.index("─ Engine") :].split("╰")[0] for text in helps]
    assert engines[0] == engines[1]
    assert "--cache-bytes" in engines[1]
