"""`hemiola serve` on a GPU: streams beside a structured request, SIGTERM among them, and nothing that stays behind."""

from __future__ import annotations

import json
import signal
import threading
import time

import pytest
import torch

from tests.support.server_process import Process

httpx, psutil = pytest.importorskip("httpx"), pytest.importorskip("psutil")
pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")
SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 5000}
SLACK_BYTES = 64 << 20


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_sigterm_under_load_leaves_nothing_on_the_gpu() -> None:
    before = used_bytes()
    server = Process("--arms", "device", "--cache-bytes", "1GiB", "--drain-seconds", "1")
    try:
        assert used_bytes() > before + SLACK_BYTES
        children = psutil.Process(server.process.pid).children(recursive=True)
        last: dict[int, str] = {}
        begun = threading.Barrier(9, timeout=30)

        def stream(number: int) -> None:
            form = {"ignore_eos": True} if number else {"structured_outputs": {"json": SCHEMA}}
            body = {"prompt": "It was", "max_tokens": 3000, "stream": True, **form}
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False) as answer:
                assert answer.status_code == 200
                lines = (line for line in answer.iter_lines() if line)
                next(lines)
                begun.wait()
                *_, last[number], done = lines
                assert done == "data: [DONE]"

        threads = [threading.Thread(target=stream, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        begun.wait()
        asked = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(30)
        assert server.end() == 0
        assert time.monotonic() - asked < 15
        assert set(last) == set(range(8))
        for line in last.values():
            event = json.loads(line.removeprefix("data: "))
            assert "error" in event or event["choices"][0]["finish_reason"] is not None
        assert not [child for child in children if child.is_running()]
    finally:
        server.close()
    deadline = time.monotonic() + 10
    while used_bytes() > before + SLACK_BYTES and time.monotonic() < deadline:
        time.sleep(0.1)
    assert used_bytes() <= before + SLACK_BYTES
