"""hemiola's own server as an oracle: captured over HTTP, held to the engine behind it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hemiola import LLM
from hemiola.evidence import Golden, GoldenItem, Server, Verdict, capture_from_server, gate, identify
from hemiola.evidence.facts import numeric_mode
from tests.serve.conftest import Live

TEXTS = ["It was a fine morning, and", "She said", "The carriage " * 12]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_num_seqs=4, cache_bytes=64 << 20, prefix_caching=False)


@pytest.fixture(scope="module")
def golden(shipped_server: Live, llm: LLM) -> Golden:
    dtype, kv_dtype = numeric_mode(llm.loaded.engine, llm.loaded.manifest)
    server = Server(shipped_server.url, device="cpu", dtype=dtype, kv_dtype=kv_dtype)
    assert llm.loaded.tokenizer is not None
    prompts = [llm.loaded.tokenizer.encode(text) for text in TEXTS]
    done: list[int] = []
    captured = capture_from_server(
        server, identify(llm.loaded.manifest, llm.loaded.config), prompts, 16, progress=done.append
    )
    assert done == [1, 2, 3]
    return captured


def test_the_shipped_models_server_is_the_engine_behind_it(golden: Golden, llm: LLM, tmp_path: Path) -> None:
    golden.write(tmp_path / "golden.json")
    golden = Golden.read(tmp_path / "golden.json")
    assert golden.engine.startswith("hemiola ")
    assert [len(item.output_ids) for item in golden.items] == [16] * 3
    assert golden.noise is not None
    assert golden.noise.positions == 48
    assert gate(llm, golden).verdict is Verdict.STRICT_PASS


def test_another_token_than_the_servers_is_no_strict_pass(golden: Golden, llm: LLM) -> None:
    first, *rest = golden.items
    assert first.decode_top is not None
    (best, value), (second, _), *others = first.decode_top[3]
    top = [*first.decode_top[:3], [(second, value), (best, value - 2.0), *others], *first.decode_top[4:]]
    ids = [*first.output_ids[:3], second, *first.output_ids[4:]]
    seeded = replace(golden, items=[GoldenItem(first.prompt_ids, ids, top, first.prefill_top), *rest])
    assert gate(llm, seeded).verdict is Verdict.DIVERGENCE
