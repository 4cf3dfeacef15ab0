"""`hemiola serve` as a process of its own: what it says when it starts, how it ends, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from hemiola.cli import app
from hemiola.cli.ending import REFUSED


class Process:
    """A server process; `events` are the lines of its log, as JSON."""

    def __init__(self, *arguments: object) -> None:
        command = [
            sys.executable,
            "-m",
            "hemiola",
            "serve",
            *map(str, arguments),
            "--port",
            "0",
            "--log-format",
            "json",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        self.events: list[dict[str, Any]] = []
        self.other: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        deadline = time.monotonic() + 120
        while not self.named("listening"):
            assert self.process.poll() is None, self.other
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self.url = self.named("listening")[0]["url"]

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("{"):
                self.events.append(json.loads(line))
            else:
                self.other.append(line)

    def named(self, event: str) -> list[dict[str, Any]]:
        return [entry for entry in self.events if entry["event"] == event]

    def end(self, number: int | None = None) -> int:
        """Send a signal, or none, and wait for the end; returns the status."""
        if number is not None:
            self.process.send_signal(number)
        status = self.process.wait(30)
        self._reader.join(10)
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.end()
        assert self.process.stderr is not None
        self.process.stderr.close()


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
