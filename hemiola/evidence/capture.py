"""Goldens from hemiola's own reference arm, from transformers in this process, and from a running server."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from hemiola import __version__
from hemiola.config.sampling import SamplingParams
from hemiola.engine.request import TokenLogprobs
from hemiola.evidence.compare import forced_rows, self_noise
from hemiola.evidence.facts import dtype_name, numeric_mode
from hemiola.evidence.golden import EvidenceError, Golden, GoldenItem
from hemiola.evidence.identity import Identity, identify
from hemiola.evidence.oracle import Oracle
from hemiola.evidence.paths import check_paths, counted
from hemiola.llm import LLM

_ID = "token_id:"
_COMPARED = 256  # alternatives of a position, to find the decoded ones among
_SERVED = 20  # alternatives of a prompt's token to ask a server for: vLLM's usual limit


def capture(
    llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int, top_k: int = 5, identity: Identity | None = None
) -> Golden:
    """Greedy tokens of hemiola's reference arm, past the end of text, and how far its decode is from its prefill.

    prompts: token ids. identity: of the checkpoint, where it is known; else it is read for it.

    Raises: EvidenceError when there are no prompts or a call ran on another arm; RequestError for an unusable prompt.
    """
    _need_prompts(prompts)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=top_k)
    with counted(llm) as paths:
        outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
        items = [
            GoldenItem(list(ids), output.token_ids, [row[:top_k] for row in output.logprobs or ()], None)
            for ids, output in zip(prompts, outputs, strict=True)
        ]
        prefill = forced_rows(llm, items, "prefill", _COMPARED)
    check_paths(paths, "reference")
    identity = identity or identify(llm.loaded.manifest, llm.loaded.config)
    dtype, kv_dtype = numeric_mode(llm.loaded.engine, llm.loaded.manifest)
    return Golden(
        engine=f"hemiola {__version__}",
        device=str(llm.loaded.engine.model.device),
        mode="reference arm, greedy, prompts in one batch",
        date=_today(),
        checkpoint_sha256=identity.checkpoint_sha256,
        items=_with_prefill(items, prefill, top_k),
        dtype=dtype,
        kv_dtype=kv_dtype,
        config=identity.config,
        noise=self_noise(items, prefill),
    )


def capture_from_transformers(
    oracle: Oracle,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    top_k: int = 5,
    identity: Identity | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Golden:
    """Greedy tokens of transformers, past the end of text, one prompt at a time. identity, progress: as below.

    Raises: EvidenceError when there are no prompts.
    """
    _need_prompts(prompts)
    items, prefill = [], []
    for done, ids in enumerate(prompts, start=1):
        output_ids, rows = oracle.decode(ids, max_tokens, top_k)
        items.append(GoldenItem(list(ids), output_ids, rows, None))
        prefill.append(oracle.prefill(ids, output_ids, _COMPARED))
        progress(done)
    identity = identity or identify(oracle.manifest, oracle.config)
    dtype = dtype_name(oracle.dtype)
    return Golden(
        engine=oracle.engine,
        device=str(oracle.device),
        mode="eager, greedy, one prompt at a time",
        date=_today(),
        checkpoint_sha256=identity.checkpoint_sha256,
        items=_with_prefill(items, prefill, top_k),
        dtype=dtype,
        kv_dtype=dtype,
        config=identity.config,
        noise=self_noise(items, prefill),
    )


@dataclass(frozen=True, slots=True)
class Server:
    """A running server, and what it does not say of itself.

    url: without /v1. model: the name to ask for; None is its first. device, dtype, kv_dtype: what it runs on and in.
    engine: name and version; None asks it. timeout_s: of one request.
    """

    url: str
    device: str
    dtype: str
    kv_dtype: str
    engine: str | None = None
    model: str | None = None
    api_key: str | None = None
    timeout_s: float = 600.0

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON that it answers; body: posted, None gets. Raises: EvidenceError."""
        headers = {"content-type": "application/json"}
        headers |= {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        data = None if body is None else json.dumps(body).encode()
        where = self.url.rstrip("/") + path
        try:
            request = urllib.request.Request(where, data, headers)
            with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                found = f"status {error.code}: {error.read(300).decode(errors='replace')}"
            raise EvidenceError("the server refuses", found=found, where=where) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise EvidenceError("no OpenAI-compatible server", found=error, where=where) from error


def capture_from_server(
    server: Server,
    identity: Identity,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    top_k: int = 5,
    progress: Callable[[int], None] = lambda done: None,
) -> Golden:
    """Greedy tokens of /v1/completions, one prompt at a time, past the end of text; the server has to know vLLM's
    `return_tokens_as_token_ids`, `ignore_eos` and `prompt_logprobs`, as hemiola's own does.

    identity: of the checkpoint that it serves, on the caller's word. prompts: token ids. progress: called with the
    prompts that are done.

    Raises: EvidenceError when there are no prompts, it cannot be reached, or its answer lacks a term.
    """
    _need_prompts(prompts)
    model = server.model or _term(server.ask("/v1/models"), "data", 0, "id")
    engine = server.engine or _engine(server)
    items, prefill = [], []
    for done, ids in enumerate(prompts, start=1):
        asked = {"model": model, "temperature": 0, "ignore_eos": True, "return_tokens_as_token_ids": True}
        answer = server.ask(
            "/v1/completions", asked | {"prompt": list(ids), "max_tokens": max_tokens, "logprobs": top_k}
        )
        output_ids, top = _decoded(answer, max_tokens, top_k)
        answer = server.ask(
            "/v1/completions",
            asked | {"prompt": [*ids, *output_ids], "max_tokens": 1, "prompt_logprobs": max(_SERVED, top_k)},
        )
        items.append(GoldenItem(list(ids), output_ids, top, None))
        prefill.append(_prefilled(answer, len(ids), len(output_ids)))
        progress(done)
    return Golden(
        engine=engine,
        device=server.device,
        mode="served, greedy, one prompt at a time",
        date=_today(),
        checkpoint_sha256=identity.checkpoint_sha256,
        items=_with_prefill(items, prefill, top_k),
        dtype=server.dtype,
        kv_dtype=server.kv_dtype,
        config=identity.config,
        noise=self_noise(items, prefill),
    )


def _need_prompts(prompts: Sequence[Sequence[int]]) -> None:
    if not prompts or not all(prompts):
        raise EvidenceError("nothing to ask the oracle", found="no prompts, or an empty one", where="prompts")


def _with_prefill(
    items: Sequence[GoldenItem], prefill: Sequence[Sequence[TokenLogprobs]], top_k: int
) -> list[GoldenItem]:
    return [replace(item, prefill_top=[row[:top_k] for row in rows]) for item, rows in zip(items, prefill, strict=True)]


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def _engine(server: Server) -> str:
    owner = _term(server.ask("/v1/models"), "data", 0, "owned_by")
    return f"{owner} {_term(server.ask('/version'), 'version')}"


def _term(answer: Any, *keys: str | int) -> Any:
    """A part of an answer. Raises: EvidenceError when it is not there."""
    part = answer
    for key in keys:
        try:
            part = part[key]
        except (LookupError, TypeError):
            raise EvidenceError(
                "a missing term", found=str(part)[:200], expected=".".join(map(str, keys)), where="the server's answer"
            ) from None
    return part


def _decoded(answer: Any, max_tokens: int, top_k: int) -> tuple[list[int], list[TokenLogprobs]]:
    """Output ids, and per position the best log-probabilities; the chosen one comes first among equals."""
    ids = [_token(text) for text in _term(answer, "choices", 0, "logprobs", "tokens")]
    tops = _term(answer, "choices", 0, "logprobs", "top_logprobs")
    if len(ids) != max_tokens or len(tops) != max_tokens:
        raise EvidenceError("a missing term", found=f"{len(ids)} tokens", expected=max_tokens, where="logprobs.tokens")
    rows = []
    for token, top in zip(ids, tops, strict=True):
        pairs = [(_token(text), _number(value)) for text, value in _pairs(top)]
        rows.append(sorted(pairs, key=lambda pair: (-pair[1], pair[0] != token))[:top_k])
    return ids, rows


def _prefilled(answer: Any, num_prompt: int, num_output: int) -> list[TokenLogprobs]:
    """Per output position the alternatives that the server ranks, best first."""
    positions = _term(answer, "choices", 0, "prompt_logprobs")
    if not isinstance(positions, list) or len(positions) != num_prompt + num_output:
        raise EvidenceError("a missing term", found=str(positions)[:80], expected="a list", where="prompt_logprobs")
    rows = []
    for position in positions[num_prompt:]:
        entries = [
            (_term(entry, "rank"), int(token), _number(_term(entry, "logprob"))) for token, entry in _pairs(position)
        ]
        rows.append([(token, value) for rank, token, value in sorted(e for e in entries if e[0] is not None)])
    return rows


def _pairs(entries: Any) -> list[tuple[str, Any]]:
    if not isinstance(entries, dict) or not entries:
        raise EvidenceError("a missing term", found=entries, expected="log-probabilities", where="the server's answer")
    return list(entries.items())


def _number(value: Any) -> float:
    if not isinstance(value, int | float):
        raise EvidenceError("a missing term", found=value, expected="a log-probability", where="the server's answer")
    return float(value)


def _token(text: str) -> int:
    if not text.startswith(_ID):
        raise EvidenceError(
            "a server that does not give token ids",
            found=text,
            expected=f"{_ID} and a number",
            where="logprobs.tokens",
            remedy="It has to know return_tokens_as_token_ids.",
        )
    return int(text.removeprefix(_ID))
