"""OpenTelemetry: a span per request, part of the client's trace, for whole and streamed answers."""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from hemiola.cli import app
from hemiola.cli.ending import REFUSED
from hemiola.front import Front
from hemiola.serve.traces import tracer_provider
from hemiola.text.tokenizer import Tokenizer
from tests.serve.conftest import serving
from tests.support.scripted_model import scripted_front

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def front(text_tokenizer: Tokenizer) -> Front:
    prompt = tuple(text_tokenizer.encode("do", add_special_tokens=False))
    return scripted_front({prompt: [100, 101, 102, 11]}, text_tokenizer)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_span_of_the_clients_trace(front: Front, stream: bool) -> None:
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    provider = pytest.importorskip("opentelemetry.sdk.trace").TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(memory))
    with serving(front, provider) as live:
        headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        body = {"prompt": "do", "stream": stream}
        assert live.http.post("/v1/completions", json=body, headers=headers).status_code == 200
        assert live.post("/v1/completions", prompt="").status_code == 400
    first, second = memory.get_finished_spans()
    assert first.name == "POST /v1/completions"
    assert f"{first.context.trace_id:032x}" == TRACE
    assert [span.attributes["http.response.status_code"] for span in (first, second)] == [200, 400]
    assert "do" not in first.attributes.values()


def test_spans_go_where_the_environment_says(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    received = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        monkeypatch.setenv("NO_PROXY", "*")
        provider = tracer_provider()
        with serving(front, provider) as live:
            assert live.http.get("/version").status_code == 200
        provider.shutdown()
        collector.shutdown()
    ((path, body),) = received
    assert path == "/v1/traces"
    assert b"hemiola" in body
    assert b"GET /version" in body


def test_without_the_packages_they_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    result = CliRunner().invoke(app, ["serve", "--traces"])
    assert result.exit_code == REFUSED
    assert "hemiola[otel]" in result.stderr
