"""The server under many streams: what its clients see, what stays behind, and what a token costs it, as JSON.

    python -m benchmarks.serve [--model DIR] [--minutes 5] [--streams 256] [--abandon 0.2] [--seed 0] [SERVE_OPTION ...]

`hemiola serve` runs as a process of its own. First 64 streams, all of which stay, for the cost of a token: processor
time of the event loop's thread over the tokens it sent, HTTP, JSON and parsers together (the engine's own thread
detokenises). Then the asked streams for the asked minutes, of which the asked part leaves somewhere: errors, the
resident set of the server and its slope over the second half. Last: nothing may be held, a known request has to be
answered as at the beginning, and SIGTERM has to end the process with status 0. Before all that, prompts fill the caches
once, because memory is resident only after its first use; in bf16 compiled products grow, too (see benchmarks.soak), so
`--dtype float32` shows the server's own memory alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from urllib.request import Request, urlopen

import psutil

from benchmarks.machine import conditions
from benchmarks.soak import slope
from hemiola.load import LoadOptions, LoadReport, run_load

SAMPLE_SECONDS = 1.0
QUIET_STREAMS = 64
LONGEST = 512
KNOWN = {"prompt": "It was a fine morning, and", "max_tokens": 16, "temperature": 0, "ignore_eos": True}


@contextmanager
def server(model: str | None, streams: int, more: list[str]) -> Iterator[tuple[psutil.Process, str]]:
    """The process and its URL; ended with SIGTERM, which has to succeed."""
    options = ["--port", 0, "--log-format", "json", "--max-num-seqs", streams, "--max-model-len", LONGEST, *more]
    command = [sys.executable, "-m", "hemiola", "serve", *([model] if model else []), *options]
    with (
        NamedTemporaryFile(suffix=".log") as log,
        subprocess.Popen([str(word) for word in command], stderr=log) as process,
    ):
        try:
            while not (found := re.search(r'"event": "listening".*"url": "([^"]+)"', Path(log.name).read_text())):
                assert process.poll() is None, Path(log.name).read_text()
                time.sleep(0.1)
            yield psutil.Process(process.pid), found[1]
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait(60)
        assert status == 0, "it did not end cleanly"


def loop_seconds(process: psutil.Process) -> float:
    """Processor time of the main thread, which is the event loop's."""
    (main,) = (thread for thread in process.threads() if thread.id == process.pid)
    return float(main.user_time + main.system_time)


def figure(url: str, name: str) -> float:
    with urlopen(f"{url}/metrics") as answer:
        found = re.search(rf"^{name}\{{.*\}} (\S+)$", answer.read().decode(), re.MULTILINE)
    assert found is not None, f"no metric {name}"
    return float(found[1])


def known_answer(url: str) -> str:
    request = Request(f"{url}/v1/completions", json.dumps(KNOWN).encode(), {"content-type": "application/json"})
    with urlopen(request) as answer:
        return str(json.load(answer)["choices"][0]["text"])


async def rounds(options: dict[str, Any], seconds: float, memory: list[tuple[float, float]], process: Any) -> Any:
    """Load until the time is over, in rounds of other prompts; the resident set in MiB by minutes, meanwhile."""
    start, reports = time.monotonic(), list[LoadReport]()

    async def watch() -> None:
        while True:
            memory.append(((time.monotonic() - start) / 60, process.memory_info().rss / 2**20))
            await asyncio.sleep(SAMPLE_SECONDS)

    watching = asyncio.ensure_future(watch())
    while time.monotonic() - start < seconds:
        reports.append(await run_load(LoadOptions(**options | {"seed": options["seed"] + len(reports)})))
    watching.cancel()
    return reports, time.monotonic() - start


def measure(
    model: str | None, minutes: float, streams: int, abandon: float, seed: int, more: list[str]
) -> dict[str, Any]:
    with server(model, streams, more) as (process, url):
        before = known_answer(url)
        mix: dict[str, Any] = {
            "url": url,
            "ignore_eos": True,
            "output_tokens": 32,
            "prompt_words": ((8, 2.0), (48, 1.0)),
            "seed": seed,
        }
        quiet = mix | {"num_requests": 2 * QUIET_STREAMS, "concurrency": QUIET_STREAMS, "prompt_words": ((8, 1.0),)}
        long = {"prompt_words": ((200, 1.0),), "output_tokens": 1, "seed": seed - 1}
        num_long = int(figure(url, "hemiola:kv_blocks")) * 16 // 200 + 1
        filled = asyncio.run(run_load(LoadOptions(**mix | long, num_requests=num_long, concurrency=QUIET_STREAMS)))
        assert {o.outcome for o in filled.outcomes} == {"finished"}, Counter(o.outcome for o in filled.outcomes)
        tokens, busy = figure(url, "vllm:generation_tokens_total"), loop_seconds(process)
        asyncio.run(run_load(LoadOptions(**quiet)))
        tokens, busy = figure(url, "vllm:generation_tokens_total") - tokens, loop_seconds(process) - busy
        memory: list[tuple[float, float]] = []
        noisy = mix | {"num_requests": 2 * streams, "concurrency": streams, "abandon": abandon}
        reports, seconds = asyncio.run(rounds(noisy, minutes * 60, memory, process))
        outcomes = sum((Counter(o.outcome for o in report.outcomes) for report in reports), Counter())
        after, half = known_answer(url), [point for point in memory if point[0] > memory[-1][0] / 2]
        time.sleep(1)
        return {
            "benchmark": "serve",
            "conditions": conditions() | {"options": more, "seed": seed},
            "streams": streams,
            "abandon": abandon,
            "seconds": round(seconds, 1),
            "outcomes": dict(outcomes),
            "errors": {name: n for name, n in outcomes.items() if name not in ("finished", "abandoned")},
            "output_tokens": figure(url, "vllm:generation_tokens_total") - tokens,
            "loop_us_per_token_at_64_streams": round(1e6 * busy / tokens, 1),
            "resident_mib": {"first": memory[0][1], "middle": half[0][1], "last": memory[-1][1]},
            "resident_mib_per_minute_second_half": round(slope(half), 3),
            "left": {
                "running": figure(url, "vllm:num_requests_running"),
                "waiting": figure(url, "vllm:num_requests_waiting"),
                "open": figure(url, "hemiola:requests_open"),
                "state_slots_used": figure(url, "hemiola:state_slots_used"),
                "failed_steps": figure(url, "hemiola:failed_steps_total"),
            },
            "known_answer_is_the_same": before == after,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--abandon", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    arguments, more = parser.parse_known_args()
    json.dump(measure(**vars(arguments), more=more), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
