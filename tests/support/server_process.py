"""`hemiola serve` as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from typing import Any


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
