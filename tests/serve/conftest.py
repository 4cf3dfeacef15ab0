"""Live servers: uvicorn in a thread, over a scripted model, the tiny text model or the shipped one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from hemiola.config.engine import EngineConfig
from hemiola.config.serve import ServeConfig
from hemiola.front import Front
from hemiola.loading import load
from hemiola.serve.server import Server
from hemiola.serve.service import Service
from hemiola.text.tokenizer import Tokenizer
from tests.support.scripted_model import scripted_front


class Live:
    """A server that listens, and ways to talk to it."""

    def __init__(self, service: Service, server: Server, thread: threading.Thread) -> None:
        self.service, self.server, self.thread = service, server, thread
        host, port = server.address
        self.url = f"http://{host}:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        self.openai = openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(trust_env=False, timeout=60),
        )

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def settle(self, seconds: float = 5.0) -> None:
        """Wait until nothing is under way, and check that nothing is left behind."""
        deadline = time.monotonic() + seconds
        engine = self.service.engine
        while engine.has_unfinished or self.service.loop.snapshot.stats.num_running:
            assert time.monotonic() < deadline, "requests are left"
            time.sleep(0.01)
        engine.check_integrity()
        stats = engine.stats()
        assert stats.slots_free == stats.slots_total

    def close(self) -> None:
        self.openai.close()
        self.http.close()
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive(), "the server does not end"


@contextmanager
def serving(front: Front, tracer_provider: Any = None, **settings: Any) -> Iterator[Live]:
    """settings: of ServeConfig."""
    config = ServeConfig(**{"port": 0, "drain_seconds": 5.0, "served_model_name": "test", **settings})
    service = Service(front, config, config.served_model_name or "test")
    server = Server(service, tracer_provider)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), name="server")
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.005)
    live = Live(service, server, thread)
    try:
        yield live
    finally:
        live.close()


@pytest.fixture(scope="session")
def text_tokenizer(text_folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(text_folder)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def text_server(text_folder: Path) -> Iterator[Live]:
    """The tiny model with a chat template: real generation, meaningless text."""
    loaded = load(text_folder, EngineConfig(max_num_seqs=8, max_model_len=1024, cache_bytes=16 << 20))
    with serving(Front(loaded.engine, loaded.tokenizer)) as live:
        yield live


@pytest.fixture(scope="module")
def shipped_server() -> Iterator[Live]:
    loaded = load(None, EngineConfig(max_num_seqs=8, cache_bytes=64 << 20))
    with serving(Front(loaded.engine, loaded.tokenizer)) as live:
        yield live


Scripts = Mapping[str, str | Sequence[int]]


@pytest.fixture
def scripted(text_tokenizer: Tokenizer) -> Iterator[Callable[..., Live]]:
    """scripted({user message: answer}, thinking=..., **settings): a server whose model answers chat messages and plain
    prompts by script; answers end with <|im_end|>, unless they are ids."""
    contexts = []

    def start(
        answers: Scripts, *, tools: Any = None, thinking: bool = True, plain: bool = False, **settings: Any
    ) -> Live:
        scripts = {}
        for prompt, answer in answers.items():
            text = prompt
            if not plain:
                messages = [{"role": "user", "content": prompt}]
                text = text_tokenizer.apply_chat_template(messages, tools, enable_thinking=thinking)
            ids = [*text_tokenizer.encode(answer), 11] if isinstance(answer, str) else list(answer)
            scripts[tuple(text_tokenizer.encode(text, add_special_tokens=False))] = ids
        engine = {key: settings.pop(key) for key in list(settings) if key in EngineConfig.__dataclass_fields__}
        front = scripted_front(scripts, text_tokenizer, vocab_size=576, **{"max_model_len": 2048, **engine})
        context = serving(front, **settings)
        contexts.append(context)
        return context.__enter__()

    yield start
    for context in contexts:
        context.__exit__(None, None, None)
