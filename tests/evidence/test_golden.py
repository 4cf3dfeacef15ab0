"""Goldens: files as they were recorded, captures from the reference arm and from a server."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hemiola import LLM, SamplingParams
from hemiola.cli import app
from hemiola.cli.ending import REFUSED
from hemiola.evidence import EvidenceError, Golden, Server, capture, capture_from_server, identify
from hemiola.evidence.compare import self_noise
from hemiola.evidence.identity import checkpoint_digest
from hemiola.formats.checkpoint import Checkpoint
from tests.support.golden import FOLDER, SCHEMES

PROMPTS = [[5, 7, 11, 13], [3], list(range(20, 60))]


@pytest.fixture(scope="module")
def folder(tiny_folder: Callable[..., Path]) -> Path:
    return tiny_folder("ME*-")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, arms="reference", cache_bytes=16 << 20, max_model_len=256)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_recorded_files_are_read_and_written_as_they_are(scheme: str, tmp_path: Path) -> None:
    file = FOLDER / f"golden-{scheme}.json"
    golden = Golden.read(file)
    assert golden.noise is not None
    assert (golden.noise.positions, golden.dtype, golden.more) == (2016, None, {"scheme": scheme, "seed": 7})
    golden.write(tmp_path / "again.json")
    recorded, again = json.loads(file.read_text()), json.loads((tmp_path / "again.json").read_text())
    assert {name: again[name] for name in recorded} == recorded
    assert again.keys() - recorded.keys() == {"dtype", "kv_dtype", "config"}


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda g: g.pop("checkpoint_sha256"), "checkpoint_sha256"),
        (lambda g: g["items"][0].pop("output_ids"), "output_ids"),
        (lambda g: g["items"][0]["decode_top"][5].reverse(), "position 5: the oracle did not decode greedily"),
        (lambda g: g["items"][0]["decode_top"].pop(), "47 positions for 48 output ids"),
        (lambda g: g["items"][0]["prefill_top"].__setitem__(3, []), "a position without log-probabilities"),
        (lambda g: g["items"][0]["prefill_top"].__setitem__(3, [[1, None]]), "NoneType"),
        (lambda g: g["self_noise_decode_vs_prefill"].pop("positions"), "positions"),
        (lambda g: g["self_noise_decode_vs_prefill"].update(mean_abs_dlogp="0.1"), "must be real number"),
        *(
            (lambda g, name=name, value=value: g["self_noise_decode_vs_prefill"].update({name: value}), name)
            for name, values in {
                "mean_abs_dlogp": (float("nan"), float("inf"), -0.1),
                "p99_abs_dlogp": (float("nan"),),
                "argmax_differs": (-0.1, 1.01, float("nan")),
                "widest_margin_of_a_differing_argmax": (float("inf"), -1),
                "positions": (0, -3),
            }.items()
            for value in values
        ),
    ],
)
def test_a_file_of_another_form_is_refused(damage: Callable[[Any], object], named: str) -> None:
    document = json.loads((FOLDER / "golden-bf16.json").read_text())
    damage(document)
    with pytest.raises(EvidenceError, match=named):
        Golden.from_json(document)


def test_a_golden_is_known_by_its_content() -> None:
    document = json.loads((FOLDER / "golden-bf16.json").read_text())
    golden = Golden.from_json(document)
    assert Golden.from_json(dict(reversed(document.items()))).sha256 == golden.sha256
    document["items"][3]["decode_top"][7][1][1] -= 0.001
    assert Golden.from_json(document).sha256 != golden.sha256


def test_no_json_at_all_is_refused(tmp_path: Path) -> None:
    (tmp_path / "golden.json").write_text("{")
    with pytest.raises(EvidenceError, match="cannot be read as a golden"):
        Golden.read(tmp_path / "golden.json")
    with pytest.raises(EvidenceError, match="cannot be read as a golden"):
        Golden.read(tmp_path / "none.json")


def test_the_digest_is_the_one_that_goldens_carry(seeded_checkpoint: Callable[[str], Path]) -> None:
    golden = Golden.read(FOLDER / "golden-lightning.json")
    assert checkpoint_digest(Checkpoint.open(seeded_checkpoint("lightning"))) == golden.checkpoint_sha256


def test_a_capture_holds_what_the_engine_says(llm: LLM, tmp_path: Path) -> None:
    golden = capture(llm, PROMPTS, max_tokens=6, top_k=3)
    greedy = SamplingParams(max_tokens=6, ignore_eos=True)
    assert [item.output_ids for item in golden.items] == [o.outputs[0].token_ids for o in llm.generate(PROMPTS, greedy)]
    assert {len(top) for item in golden.items for top in [*item.decode_top, *item.prefill_top]} == {3}
    assert all([top[0][0] for top in item.decode_top] == item.output_ids for item in golden.items)
    assert (golden.dtype, golden.kv_dtype, golden.device) == ("float32", "float32", "cpu")
    assert golden.config is not None
    assert golden.config["layers"] == list("ME*-")
    assert golden.noise is not None
    assert 0 < golden.noise.mean_abs_dlogp < 1e-4, "float32: prefill and decode differ by rounding"
    assert golden.noise.positions == 18
    golden.write(tmp_path / "golden.json")
    assert Golden.read(tmp_path / "golden.json") == golden


def test_the_noise_is_that_of_the_two_lists() -> None:
    """vLLM's decode against its prefill, from the recorded lists: near what it said of itself on more prompts."""
    golden = Golden.read(FOLDER / "golden-bf16.json")
    noise = self_noise(golden.items, [item.prefill_top or () for item in golden.items])
    assert noise.positions == 24 * 48
    assert noise.argmax_differs == 24 / noise.positions
    assert noise.mean_abs_dlogp == pytest.approx(0.0406, abs=1e-4)
    assert noise.widest_margin_of_a_differing_argmax == pytest.approx(0.25)


def test_only_the_reference_arm_is_captured(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([{}, {path._replace(arm="device"): 5 for path in llm.path_counts()}])
    monkeypatch.setattr(LLM, "path_counts", lambda self: next(counts))
    with pytest.raises(EvidenceError, match="another arm"):
        capture(llm, PROMPTS[:1], max_tokens=2)


def test_nothing_to_ask_is_refused(llm: LLM) -> None:
    for prompts in ([], [[1], []]):
        with pytest.raises(EvidenceError, match="nothing to ask"):
            capture(llm, prompts, max_tokens=2)


class Handler(BaseHTTPRequestHandler):
    """/v1/completions as vLLM answers it, by an LLM of the server's; `damage` is applied to every answer."""

    server: OracleServer

    def do_GET(self) -> None:
        models = {"data": [{"id": "tiny", "owned_by": "vllm"}]}
        self.answer({"/v1/models": models, "/version": {"version": "0.25.0"}}[self.path])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["ignore_eos"]
        assert body["return_tokens_as_token_ids"]
        assert body["temperature"] == 0
        params = SamplingParams(
            max_tokens=body["max_tokens"],
            ignore_eos=True,
            logprobs=body.get("logprobs"),
            prompt_logprobs=body.get("prompt_logprobs"),
        )
        (output,) = self.server.llm.generate([body["prompt"]], params)
        choice: dict[str, Any] = {"text": "?", "logprobs": None}
        if "logprobs" in body:
            choice["logprobs"] = {
                "tokens": [f"token_id:{token}" for token in output.outputs[0].token_ids],
                "top_logprobs": [
                    {f"token_id:{token}": value for token, value in row[::-1]} for row in output.outputs[0].logprobs
                ],
            }
        if "prompt_logprobs" in body:
            choice["prompt_logprobs"] = [
                row and {str(token): {"logprob": value, "rank": rank} for rank, (token, value) in enumerate(row, 1)}
                for row in output.prompt_logprobs
            ]
        self.server.damage(choice)
        self.answer({"choices": [choice]})

    def answer(self, document: Any) -> None:
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class OracleServer(HTTPServer):
    llm: LLM
    damage: Callable[[dict[str, Any]], object] = staticmethod(lambda choice: None)


@pytest.fixture
def oracle(llm: LLM) -> Iterator[OracleServer]:
    server = OracleServer(("127.0.0.1", 0), Handler)
    server.llm = llm
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def client(oracle: OracleServer) -> Server:
    return Server(f"http://127.0.0.1:{oracle.server_port}", device="a GPU", dtype="float32", kv_dtype="float32")


def test_a_server_is_captured_as_the_engine_behind_it(oracle: OracleServer, llm: LLM) -> None:
    identity = identify(llm.loaded.manifest, llm.loaded.config)
    served = capture_from_server(client(oracle), identity, PROMPTS, max_tokens=4)
    own = capture(llm, PROMPTS, max_tokens=4)
    assert served.engine == "vllm 0.25.0"
    assert [i.output_ids for i in served.items] == [i.output_ids for i in own.items]
    for theirs, ours in zip(served.items, own.items, strict=True):
        for name in ("decode_top", "prefill_top"):
            for row, expected in zip(getattr(theirs, name), getattr(ours, name), strict=True):
                assert [token for token, _ in row] == [token for token, _ in expected]
                assert [value for _, value in row] == pytest.approx([value for _, value in expected], abs=1e-4)
    assert replace(served, engine="", device="", mode="", items=[], noise=None) == replace(
        own, engine="", device="", mode="", items=[], noise=None
    )


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda choice: choice["logprobs"].__setitem__("tokens", list("abcd")), "does not give token ids"),
        (lambda choice: choice["logprobs"]["tokens"].pop(), "3 tokens"),
        (lambda choice: choice["logprobs"].pop("top_logprobs"), "top_logprobs"),
        (lambda choice: choice["logprobs"]["top_logprobs"].__setitem__(0, None), "log-probabilities"),
        (lambda choice: choice.__setitem__("logprobs", None), "tokens"),
    ],
)
def test_a_server_that_leaves_out_a_term_is_refused(
    oracle: OracleServer, llm: LLM, damage: Callable[[Any], object], named: str
) -> None:
    oracle.damage = damage
    identity = identify(llm.loaded.manifest, llm.loaded.config)
    with pytest.raises(EvidenceError, match=named):
        capture_from_server(client(oracle), identity, PROMPTS[:1], max_tokens=4)


def test_a_server_without_prompt_logprobs_is_refused(oracle: OracleServer, llm: LLM) -> None:
    oracle.damage = lambda choice: choice.pop("prompt_logprobs", None)
    with pytest.raises(EvidenceError, match="prompt_logprobs"):
        capture_from_server(client(oracle), identify(llm.loaded.manifest, llm.loaded.config), PROMPTS[:1], 4)


def test_no_server_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text("[[1, 2]]")
    command = ["golden", str(folder), str(tmp_path / "golden.json"), "--prompt-ids", str(tmp_path / "ids.json")]
    command += ["--server", "http://127.0.0.1:9"]
    result = CliRunner().invoke(app, command)
    assert (result.exit_code, "--server-device" in result.stderr) == (REFUSED, True)
    command += ["--server-device", "a GPU", "--dtype", "bf16", "--kv-cache-dtype", "model"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == REFUSED
    assert "no OpenAI-compatible server" in result.stderr
    assert not (tmp_path / "golden.json").exists()
