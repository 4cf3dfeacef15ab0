"""Errors in OpenAI's shape, with the field; limits, keys and origins."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.serve.conftest import Live

HI: Any = [{"role": "user", "content": "hi"}]
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": HI, "temprature": 1}, "temprature"),
        (CHAT, {"messages": HI, "temperature": "1"}, "temperature"),
        (CHAT, {"messages": HI, "temperature": float("inf")}, "temperature"),
        (CHAT, {"messages": HI, "top_p": 0}, "top_p"),
        (CHAT, {"messages": HI, "n": 0}, "n"),
        (CHAT, {"messages": HI, "n": 65}, "n"),
        (CHAT, {"messages": HI, "max_tokens": True}, "max_tokens"),
        (CHAT, {"messages": HI, "seed": 2**63}, "seed"),
        (CHAT, {"messages": HI, "top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": HI, "stop": [""]}, "stop[0]"),
        (CHAT, {"messages": HI, "stop_token_ids": [576]}, "stop_token_ids[0]"),
        (CHAT, {"messages": HI, "min_tokens": 9, "max_tokens": 5}, "min_tokens"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0]"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "extra": 1}]}, "messages[0].extra"),
        (
            CHAT,
            {"messages": HI, "tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
        ),
        (CHAT, {"messages": HI, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": HI, "stream_options": {"usage": True}}, "stream_options.usage"),
        (CHAT, {"messages": HI, "store": True}, "store"),
        (CHAT, {"messages": HI, "functions": []}, "functions"),
        (CHAT, {"messages": HI, "thinking_token_budget": -1}, "thinking_token_budget"),
        (CHAT, {"messages": HI, "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
        (PLAIN, {"prompt": "x", "logprobs": 21}, "logprobs"),
        (PLAIN, {"prompt": "x", "logprobs": -1}, "logprobs"),
        (PLAIN, {"prompt": ["x"] * 65}, "prompt"),
        (PLAIN, {"prompt": {"a": 1}}, "prompt"),
        (PLAIN, {"prompt": "\ud800"}, None),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {"tokens": [576]}, "tokens[0]"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_a_400_that_names_the_field(
    text_server: Live, path: str, body: dict[str, Any], param: str | None, stream: bool
) -> None:
    if stream and path.startswith("/v1"):
        body = body | {"stream": True}
    answer = text_server.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]
    assert "request-" not in error["message"], "the engine's name of the request"


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b'"x"', b"\xff\xfe", b"{" * 20_000])
def test_a_body_that_is_no_object_is_a_400(text_server: Live, body: bytes) -> None:
    answer = text_server.http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_unknown_paths_and_methods_have_the_same_shape(text_server: Live) -> None:
    assert text_server.http.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    answer = text_server.http.get(CHAT)
    assert (answer.status_code, "GET" in answer.json()["error"]["message"]) == (405, True)


def test_a_prompt_that_does_not_fit_names_the_arithmetic(text_server: Live) -> None:
    answer = text_server.post(PLAIN, prompt="bada " * 2000, max_tokens=8)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "1024" in answer.json()["error"]["message"]


def test_large_bodies_are_refused_by_their_length(scripted: Callable[..., Live]) -> None:
    live = scripted({"do": "bada"}, plain=True, max_body_bytes=1000, max_prompt_tokens=50)
    assert live.post(PLAIN, prompt="do").status_code == 200
    answer = live.post(PLAIN, prompt="x" * 2000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    chunks = (b'{"prompt": "' + b"x" * 600, b"x" * 600 + b'"}')
    answer = live.http.post(PLAIN, content=iter(chunks), headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    answer = live.post(PLAIN, prompt="x" * 300)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "prompt_too_long")
    # The declared length alone is enough: nothing of the body is waited for.
    host, port = live.server.address
    with socket.create_connection((host, port), timeout=10) as connection:
        head = f"POST {PLAIN} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")


def test_too_much_at_once_is_refused_and_told_when_to_come_back(scripted: Callable[..., Live]) -> None:
    live = scripted({"do": [100] * 1500}, plain=True, max_streams=2, retry_after_s=7)
    body = {"prompt": "do", "max_tokens": 1400, "stream": True}
    with live.http.stream("POST", PLAIN, json=body) as one, live.http.stream("POST", PLAIN, json=body) as two:
        assert (one.status_code, two.status_code) == (200, 200)
        answer = live.post(PLAIN, prompt="do")
        assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
        assert answer.headers["retry-after"] == "7"
        assert 'hemiola:requests_refused_total{engine="0",limit="streams",model_name="test"} 1.0' in metrics(live)
    live.settle()
    assert live.post(PLAIN, prompt="do", max_tokens=1).status_code == 200


def test_requests_that_are_prepared_at_once_are_not_all_let_in(
    scripted: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the grammar of one is made, others may come; the limit counts when it is ready."""
    live = scripted({"do": [100] * 1500}, plain=True, max_streams=1)
    both_prepared = threading.Barrier(2)

    async def prepare(*arguments: object) -> None:
        await asyncio.to_thread(both_prepared.wait, 10)

    monkeypatch.setattr(live.service, "_compile", prepare)
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(live.post, PLAIN, prompt="do", max_tokens=1400) for _ in range(2)]
        assert sorted(answer.result().status_code for answer in answers) == [200, 429]
    live.settle()


def test_the_queue_has_an_end(scripted: Callable[..., Live]) -> None:
    live = scripted({"do": [100] * 1500}, plain=True, max_num_seqs=1, max_waiting=1)
    body = {"prompt": "do", "max_tokens": 1400, "stream": True}
    with live.http.stream("POST", PLAIN, json=body), live.http.stream("POST", PLAIN, json=body):
        answer = live.post(PLAIN, prompt="do")
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    live.settle()


def metrics(live: Live) -> str:
    return live.http.get("/metrics").text


def test_keys_are_asked_for_where_there_are_any(scripted: Callable[..., Live], monkeypatch: pytest.MonkeyPatch) -> None:
    live = scripted({"do": "bada"}, plain=True, api_keys=("first-key", "schlüssel"))
    body = {"prompt": "do"}
    for wrong in (None, "Bearer wrong", "Bearer", "first-key"):
        answer = live.http.post(PLAIN, json=body, headers={} if wrong is None else {"authorization": wrong})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
    assert live.http.get("/v1/models").status_code == 401
    assert live.post("/tokenize", prompt="do").status_code == 401
    for path in ("/health", "/version", "/metrics"):
        assert live.http.get(path).status_code == 200
    for key in (b"first-key", "schlüssel".encode()):
        for name, value in ((b"authorization", b"Bearer " + key), (b"x-api-key", key)):
            answer = httpx.post(live.url + PLAIN, json=body, headers=[(name, value)], trust_env=False)
            assert answer.status_code == 200
    compared: list[bytes] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(b)
        return a == b

    monkeypatch.setattr("hemiola.serve.admission.hmac.compare_digest", compare)
    live.http.post(PLAIN, json=body, headers={"authorization": "Bearer first-key"})
    assert len(compared) == 2, "every key is compared, also after a match"


def test_other_origins_are_not_let_in_unless_named(scripted: Callable[..., Live]) -> None:
    preflight = {"origin": "http://page", "access-control-request-method": "POST"}
    closed = scripted({"do": "bada"}, plain=True)
    assert "access-control-allow-origin" not in closed.http.options(PLAIN, headers=preflight).headers
    named = scripted({"do": "bada"}, plain=True, allowed_origins=("http://page",))
    assert named.http.options(PLAIN, headers=preflight).headers["access-control-allow-origin"] == "http://page"
    other = named.http.options(PLAIN, headers=preflight | {"origin": "http://other"})
    assert "access-control-allow-origin" not in other.headers
    # A page of another origin cannot send JSON without a preflight; other types are not taken for JSON.
    answer = closed.http.post(PLAIN, content=b'{"prompt": "do"}', headers={"content-type": "text/plain"})
    assert answer.status_code == 400


def test_a_defect_is_a_500_that_tells_nothing(scripted: Callable[..., Live], monkeypatch: pytest.MonkeyPatch) -> None:
    live = scripted({"do": "bada"}, plain=True)

    def broken(*arguments: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(live.service, "check_model", broken)
    answer = live.post(PLAIN, prompt="do")
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert "secret" not in answer.text


def test_an_engine_that_fails_before_a_prompt_is_taken_up_is_not_the_clients_fault(
    scripted: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    live = scripted({"do": "bada"}, plain=True)

    def broken(*arguments: object, **more: object) -> None:
        raise RuntimeError("secret")

    with monkeypatch.context() as patches:
        patches.setattr(live.service.loop._front, "add", broken)
        answer = live.http.post(PLAIN, json={"prompt": "do"}, timeout=5)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")
    assert "secret" not in answer.text
    assert live.post(PLAIN, prompt="do").status_code == 200
