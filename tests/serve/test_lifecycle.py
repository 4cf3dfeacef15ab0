"""Clients that leave, servers that end, requests beside each other, and what is told of it all."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import random
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import uvicorn

from hemiola.config.sampling import SamplingParams
from hemiola.config.serve import ServeConfig
from hemiola.serve.generation import Generation, Origin
from hemiola.serve.loop import Finish, Job, Update
from hemiola.serve.server import Server
from hemiola.serve.service import Service
from hemiola.text.tokenizer import Tokenizer
from tests.serve.conftest import Live
from tests.support.scripted_model import scripted_front

PLAIN = "/v1/completions"
ENDLESS = {"do": [100] * 1990}


def slow_steps(live: Live, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    forward = live.service.engine.model.forward

    def slow(*arguments: Any, **more: Any) -> Any:
        time.sleep(seconds)
        return forward(*arguments, **more)

    monkeypatch.setattr(live.service.engine.model, "forward", slow)


def raw_request(live: Live, body: dict[str, Any]) -> socket.socket:
    connection = socket.create_connection(live.server.address, timeout=10)
    data = json.dumps(body).encode()
    head = f"POST {PLAIN} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def wait_for(condition: Callable[[], Any], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.002)


@pytest.mark.parametrize("stream", [True, False])
def test_b32_a_client_that_leaves_frees_its_request(
    scripted: Callable[..., Live], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    live = scripted(ENDLESS, plain=True, max_num_seqs=1)
    slow_steps(live, monkeypatch, 0.005)
    body = {"prompt": "do", "max_tokens": 1900, "stream": stream}
    connection = raw_request(live, body)
    wait_for(lambda: live.service.engine.stats().num_decode_tokens > 5)
    queued = raw_request(live, body)
    wait_for(lambda: live.service.engine.stats().num_waiting == 1)
    queued.close()
    wait_for(lambda: live.service.engine.stats().num_waiting == 0, 1)
    assert live.service.engine.stats().num_running == 1, "the other one runs on"
    connection.close()
    wait_for(lambda: not live.service.engine.has_unfinished, 1)
    done = live.service.engine.stats().num_decode_tokens
    live.settle()
    assert live.service.engine.stats().num_decode_tokens <= done + 1
    assert live.post(PLAIN, prompt="do", max_tokens=3).json()["usage"]["completion_tokens"] == 3
    assert 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="test"} 2.0' in metrics(live)


def test_b32_a_client_that_leaves_in_its_prompt(scripted: Callable[..., Live], monkeypatch: pytest.MonkeyPatch) -> None:
    live = scripted(ENDLESS, plain=True, max_num_batched_tokens=16)
    slow_steps(live, monkeypatch, 0.01)
    connection = raw_request(live, {"prompt": [20] * 1500, "max_tokens": 5})
    wait_for(lambda: live.service.engine.stats().num_prefill_tokens > 32)
    connection.close()
    wait_for(lambda: not live.service.engine.has_unfinished, 1)
    live.settle()
    assert live.service.engine.stats().num_prefill_tokens < 1500


def test_b32_a_client_that_leaves_between_the_last_token_and_the_end(scripted: Callable[..., Live]) -> None:
    live = scripted({"do": "bada lo mi"}, plain=True)
    for _ in range(10):
        with raw_request(live, {"prompt": "do", "stream": True}) as connection:
            read = b""
            while b'"stop"' not in read:
                read += connection.recv(100)
    live.settle(1)
    wait_for(lambda: 'hemiola:requests_open{engine="0",model_name="test"} 0.0' in metrics(live), 1)
    assert live.post(PLAIN, prompt="do").json()["choices"][0]["text"] == "bada lo mi"


def test_health_tells_of_steps_that_stall(scripted: Callable[..., Live], monkeypatch: pytest.MonkeyPatch) -> None:
    live = scripted(ENDLESS, plain=True, stall_seconds=0.1)
    assert live.http.get("/health").status_code == 200
    gate = threading.Event()
    forward = live.service.engine.model.forward
    monkeypatch.setattr(live.service.engine.model, "forward", lambda *a, **k: gate.wait(10) and forward(*a, **k))
    with raw_request(live, {"prompt": "do", "max_tokens": 2}) as connection:
        wait_for(lambda: live.http.get("/health").status_code == 503)
        assert "hemiola:healthy" in metrics(live), "what is asked meanwhile is answered"
        assert re.search(r"^hemiola:healthy\{.*\} 0\.0$", metrics(live), re.MULTILINE)
        gate.set()
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    wait_for(lambda: live.http.get("/health").status_code == 200)


def test_ending_lets_streams_finish(scripted: Callable[..., Live], monkeypatch: pytest.MonkeyPatch) -> None:
    live = scripted(ENDLESS, plain=True)
    slow_steps(live, monkeypatch, 0.005)
    with live.http.stream("POST", PLAIN, json={"prompt": "do", "max_tokens": 60, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        live.server.should_exit = True
        wait_for(lambda: live.service.is_draining)
        with pytest.raises(httpx.TransportError):
            httpx.get(live.url + "/health", trust_env=False)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    live.thread.join(10)
    assert not live.thread.is_alive()


@pytest.mark.parametrize("stream", [True, False])
def test_what_does_not_finish_in_time_ends_with_an_error(
    scripted: Callable[..., Live], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    live = scripted(ENDLESS, plain=True, drain_seconds=0.3)
    slow_steps(live, monkeypatch, 0.01)
    started = threading.Timer(0.2, lambda: setattr(live.server, "should_exit", True))
    started.start()
    begun = time.monotonic()
    answer = live.post(PLAIN, prompt="do", max_tokens=1900, stream=stream)
    if stream:
        lines = [line for line in answer.text.splitlines() if line]
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["type"] == "server_error"
        assert lines[-1] == "data: [DONE]"
    else:
        assert answer.status_code == 503
        assert "shutting down" in answer.json()["error"]["message"]
    live.thread.join(10)
    assert not live.thread.is_alive()
    assert time.monotonic() - begun < 4
    assert not live.service.loop.is_alive
    assert not live.service.engine.has_unfinished


def test_streams_beside_each_other_are_what_they_are_alone(text_server: Live) -> None:
    rng = random.Random(3)
    words = ["bada", "fu", "kan", "zi", "do", "re"]
    prompts = [" ".join(rng.choices(words, k=rng.randint(1, 60))) for _ in range(24)]
    body: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True, "stream": True}

    def ask(index: int) -> list[int]:
        ids: list[int] = []
        with httpx.stream(
            "POST", text_server.url + PLAIN, json={"prompt": prompts[index], **body}, timeout=60, trust_env=False
        ) as answer:
            for line in answer.iter_lines():
                if leaves[index] and len(ids) >= 4:
                    return ids
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        ids += choice["token_ids"]
        return ids

    leaves = [False] * len(prompts)
    alone = [ask(index) for index in range(len(prompts))]
    assert all(len(ids) == 12 for ids in alone)
    leaves = [rng.random() < 0.3 for _ in prompts]
    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(ask, range(len(prompts))))
    for index, ids in enumerate(together):
        assert ids == alone[index][: len(ids)]
        assert leaves[index] or len(ids) == 12
    text_server.settle()


def metrics(live: Live) -> str:
    return live.http.get("/metrics").text


def test_metrics_have_the_names_that_dashboards_know(scripted: Callable[..., Live]) -> None:
    live = scripted({"do": "bada lo mi"}, plain=True)
    answers = [live.post(PLAIN, prompt="do").json() for _ in range(3)]
    live.settle()
    text = metrics(live)
    label = '{engine="0",model_name="test"}'
    usage = answers[0]["usage"]
    for line in (
        f"vllm:num_requests_running{label} 0.0",
        f"vllm:num_requests_waiting{label} 0.0",
        f"vllm:kv_cache_usage_perc{label} 0.0",
        f"vllm:prompt_tokens_total{label} {3.0 * usage['prompt_tokens']}",
        f"vllm:generation_tokens_total{label} {3.0 * usage['completion_tokens']}",
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="test"} 3.0',
        f"vllm:time_to_first_token_seconds_count{label} 3.0",
        f"vllm:inter_token_latency_seconds_count{label} {3.0 * (usage['completion_tokens'] - 1)}",
        f"vllm:e2e_request_latency_seconds_count{label} 3.0",
        f"vllm:request_queue_time_seconds_count{label} 3.0",
        f"vllm:prefix_cache_queries_total{label} {3.0 * usage['prompt_tokens']}",
        f"hemiola:state_slots_used{label} 0.0",
        'hemiola:prefix_misses_total{engine="0",model_name="test",reason="too_short"} 3.0',
    ):
        assert line in text.splitlines(), line
    assert 'hemiola:op_calls_total{arm="reference",engine="0",model_name="test",op="sample"' in text


def test_models_version_and_what_is_refused(text_server: Live) -> None:
    (model,) = text_server.openai.models.list().data
    assert model.id == "test"
    assert text_server.openai.models.retrieve("test").id == "test"
    assert text_server.http.get("/v1/models/other").status_code == 404
    assert text_server.http.get("/version").json()["version"]
    assert text_server.post("/v1/embeddings", input="x", model="test").status_code == 400


def test_what_comes_after_a_request_was_given_up_is_not_counted(text_tokenizer: Tokenizer) -> None:
    service = Service(scripted_front({}, text_tokenizer), ServeConfig(port=0), "test")

    async def give_up() -> None:
        generation = Generation(service.loop, service.metrics, Origin("mine", PLAIN, 0.0), lambda closed: None)
        job = Job(0, [20], SamplingParams(), generation.receive)
        begun = asyncio.create_task(generation.begin([job], None))
        await asyncio.sleep(0)
        generation.receive(job, None)
        await begun
        generation.close()
        finish = Finish("stop", None, None, 0, None, 0)
        generation.receive(job, Update(0, "bada", [100], [], 1.0, finish))

    asyncio.run(give_up())
    text = service.metrics.text().decode()
    assert 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="test"} 1.0' in text
    assert 'finished_reason="stop"' not in text


@pytest.mark.parametrize("asked", [False, True])
def test_the_log_holds_no_text_unless_asked(
    scripted: Callable[..., Live], caplog: pytest.LogCaptureFixture, asked: bool
) -> None:
    caplog.set_level(logging.INFO, logger="hemiola")
    live = scripted({"do re": "bada lo mi"}, plain=True, log_requests=asked)
    answer = live.http.post(PLAIN, json={"prompt": "do re"}, headers={"x-request-id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    (record,) = [record for record in caplog.records if record.getMessage() == "request"]
    fields: dict[str, Any] = record.fields  # type: ignore[attr-defined]  # what logging's extra adds
    assert fields["id"] == "mine"
    assert (fields["outcome"], fields["finish"], fields["endpoint"]) == ("finished", "stop", PLAIN)
    assert fields["output_tokens"] == answer.json()["usage"]["completion_tokens"]
    assert fields["first_token_s"] > 0
    assert ("bada lo mi" in str(fields)) == asked
    assert ("do re" in str(fields)) == asked


def test_what_a_server_begins_with_is_no_garbage_to_look_for(
    text_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets=None: frozen.append(gc.get_freeze_count()))
    server = Server(Service(scripted_front({}, text_tokenizer), ServeConfig(port=0), "test"))
    num_tracked = len(gc.get_objects())
    try:
        server.run()
    finally:
        gc.unfreeze()
    assert frozen[0] > num_tracked / 2
