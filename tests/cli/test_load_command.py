"""`hemiola load` against a live server: what it counts is what the server did."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from hemiola.cli import app
from hemiola.cli.ending import REFUSED
from hemiola.config.engine import EngineConfig
from hemiola.errors import ConfigError
from hemiola.evidence.comparison import why_not
from hemiola.evidence.records import read
from hemiola.front import Front
from hemiola.load import LoadOptions, percentile, plan_requests
from hemiola.loading import load
from tests.serve.conftest import Live, serving

SMALL = ["--prompt-words", "8:2,30:1", "--output-tokens", "6", "--ignore-eos"]


@pytest.fixture(scope="module")
def server(text_folder: Path) -> Iterator[Live]:
    loaded = load(text_folder, EngineConfig(max_num_seqs=8, max_model_len=1024, cache_bytes=16 << 20))
    with serving(Front(loaded.engine, loaded.tokenizer), api_keys=("key",)) as live:
        yield live


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text("key\n")
    return file


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["load", *map(str, arguments)])


@pytest.mark.parametrize(
    "loop",
    [
        ["--concurrency", "4"],
        ["--rate-per-s", "50"],
        ["--rate-per-s", "50", "--arrivals", "fixed"],
        ["--concurrency", "4", "--chat"],
    ],
)
def test_what_it_reports_is_what_the_server_did(server: Live, key_file: Path, tmp_path: Path, loop: list[str]) -> None:
    plot = tmp_path / "plot.svg"
    before = replace(server.service.engine.stats().prefix)
    result = run(
        server.url, "--api-key-file", key_file, "--num-requests", 12, *SMALL, *loop, "--json", "-", "--plot", plot
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    after = server.service.engine.stats().prefix
    assert report["outcomes"] == {"finished": 12}
    assert report["output_tokens"] == 72
    assert report["prompt_tokens"] == after.tokens - before.tokens
    assert report["cached_tokens"] == after.tokens_hit - before.tokens_hit
    latencies = report["latencies_s"]
    assert latencies["first_token"]["count"] == latencies["end_to_end"]["count"] == 12
    assert 0 < latencies["first_token"]["p50"] <= latencies["end_to_end"]["p50"] <= report["seconds"]
    assert latencies["per_token"]["mean"] > 0
    assert "api_key" not in report["options"]
    assert len(ElementTree.fromstring(plot.read_text())) > 10
    server.settle()


def test_the_table_and_clients_that_leave(server: Live, key_file: Path) -> None:
    arguments = ["--api-key-file", key_file, "--num-requests", 10, "--concurrency", 5, *SMALL, "--abandon", 1]
    result = run(server.url, *arguments, "--json", "-")
    requests = json.loads(result.stdout)["requests"]
    assert len(requests) == 10
    left = [request for request in requests if request["outcome"] == "abandoned"]
    assert any(request["first_s"] is None for request in left)
    assert any(request["first_s"] is not None and request["end_s"] is None for request in left), "none in mid-answer"
    server.settle()
    result = run(server.url, "--api-key-file", key_file, "--num-requests", 4, "--concurrency", 2, *SMALL)
    assert "4 finished" in result.stdout
    assert "first token" in result.stdout


def test_a_second_run_with_a_warm_cache_is_not_compared_with_the_first(
    server: Live, key_file: Path, tmp_path: Path
) -> None:
    """The same prompts twice: the second time, the server's prefix cache knows them."""
    command = [server.url, "--api-key-file", key_file, "--concurrency", 2, "--num-requests", 4, "--prompt-words", 60]
    command += ["--output-tokens", 4, "--ignore-eos", "--seed", 77, "--record", tmp_path, "--server-device", "a CPU"]
    for _ in range(2):
        assert run(*command).exit_code == 0
    cold, warm = (record.claim for record in read(tmp_path).records)
    assert (cold.more["cached_tokens"], warm.more["cached_tokens"] > 0) == (0, True)
    assert list(cold.marks) == ["UNGATED"]
    assert "cache state differs: cached 0.0% of prompt tokens, " in why_not(cold, warm)
    assert why_not(cold, cold) == ""
    assert "hardware is not stated" in why_not(cold, replace(warm, machine={**warm.machine, "device": None}))
    assert [figure.value is not None for figure in cold.figures] == [True] * len(cold.figures)
    assert "key" not in {str(value) for value in cold.workload.values()}


def test_errors_are_counted_not_hidden(server: Live, key_file: Path) -> None:
    arguments = ["--api-key-file", key_file, "--num-requests", 3, "--concurrency", 1, "--output-tokens", 5000]
    result = run(server.url, *arguments, "--json", "-")
    outcomes = json.loads(result.stdout)["outcomes"]
    assert sum(outcomes.values()) == 3
    assert all(outcome.startswith("status 400") for outcome in outcomes)


def test_a_stream_that_breaks_off_is_no_answer(key_file: Path) -> None:
    """A server that ends its stream in the middle."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        chunk = b'data: {"choices": [{"text": "x"}]}\n\n'
        head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n0\r\n\r\n")
        await writer.drain()
        writer.close()

    ready, address = threading.Event(), []

    async def listen() -> None:
        listener = await asyncio.start_server(answer, "127.0.0.1", 0)
        address.append((listener.sockets[0].getsockname()[1], asyncio.get_running_loop(), listener))
        ready.set()
        async with listener:
            await listener.wait_closed()

    thread = threading.Thread(target=lambda: asyncio.run(listen()))
    thread.start()
    ready.wait(10)
    port, loop, listener = address[0]
    result = run(f"http://127.0.0.1:{port}", "--model", "x", "--num-requests", 1, "--concurrency", 1, "--json", "-")
    loop.call_soon_threadsafe(listener.close)
    thread.join(10)
    assert json.loads(result.stdout)["outcomes"] == {"the stream broke off": 1}


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["http://127.0.0.1:9", "--concurrency", 1], "no OpenAI-compatible server"),
        (["http://127.0.0.1:9"], "concurrency"),
        (["http://127.0.0.1:9", "--concurrency", 1, "--rate-per-s", 1], "concurrency"),
        (["ftp://x", "--concurrency", 1], "URL"),
        (["http://x", "--rate-per-s", 1, "--arrivals", "bursty"], "arrivals"),
        (["http://x", "--concurrency", 0], "concurrency"),
        (["http://x", "--concurrency", 1, "--abandon", 2], "abandon"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[Any], word: str) -> None:
    result = run(*arguments)
    assert result.exit_code == REFUSED
    assert word in result.stderr


def test_plans_repeat_and_keep_to_their_shapes() -> None:
    options: dict[str, Any] = {"url": "http://x", "rate_per_s": 100.0, "num_requests": 400, "shared_words": 20}
    options |= {"num_prefixes": 3, "prompt_words": ((10, 1.0), (50, 3.0)), "abandon": 0.25}
    plan = list(plan_requests(LoadOptions(**options)))
    assert plan == list(plan_requests(LoadOptions(**options)))
    assert plan != list(plan_requests(LoadOptions(**options, seed=1)))
    lengths = [len(request.prompt.split()) for request in plan]
    assert set(lengths) == {30, 70}
    assert 0.65 < lengths.count(70) / 400 < 0.85
    assert len({" ".join(request.prompt.split()[:20]) for request in plan}) == 3
    assert 0.15 < sum(request.leave_after is not None for request in plan) / 400 < 0.35
    assert 3 < plan[-1].at_s < 5
    fixed = list(plan_requests(LoadOptions(**options, arrivals="fixed")))
    gaps = [b.at_s - a.at_s for a, b in pairwise(fixed)]
    assert gaps == pytest.approx([0.01] * 399)
    with pytest.raises(ConfigError):
        LoadOptions("http://x", concurrency=1, prompt_words=())


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, percent) for percent in (50, 99, 100, 0)] == [50.0, 99.0, 100.0, 1.0]
    assert percentile([7.0], 99) == 7.0
