"""/v1/completions: prompts of all forms, echo with log-probabilities, and what may not reach the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from hemiola import LLM, SamplingParams
from hemiola.config.engine import EngineConfig
from hemiola.front import Delta, Front
from hemiola.loading import load
from tests.serve.conftest import Live, serving
from tests.serve.test_chat import HI
from tests.support.tiny_tokenizer import byte_ids

PROMPT = "bada fu kan zi do re mi lo " * 4
GREEDY = {"max_tokens": 6, "ignore_eos": True, "return_token_ids": True}


def texts(live: Live, **body: Any) -> dict[int, str]:
    """A streamed answer's text by choice."""
    shown: dict[int, str] = {}
    for chunk in live.openai.completions.create(stream=True, **{"model": "test", **body}):
        for choice in chunk.choices:
            shown[choice.index] = shown.get(choice.index, "") + choice.text
    return shown


def test_many_prompts_of_either_form_as_one_request(text_server: Live) -> None:
    create: Any = text_server.openai.completions.create
    prompts = ["bada fu", "kan zi do"]
    ids = [text_server.post("/tokenize", prompt=prompt).json()["tokens"] for prompt in prompts]
    options: Any = {"model": "test", "max_tokens": 6, "n": 2, "temperature": 1.0, "seed": 2}
    answer = create(prompt=prompts, **options, extra_body={"ignore_eos": True, "return_token_ids": True})
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({tuple(choice.token_ids) for choice in answer.choices}) == 4
    by_ids = create(prompt=ids, **options, extra_body={"ignore_eos": True})
    assert [choice.text for choice in by_ids.choices] == [choice.text for choice in answer.choices]
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    streamed = texts(text_server, prompt=prompts, extra_body={"ignore_eos": True}, **options)
    assert [streamed[index] for index in range(4)] == [choice.text for choice in answer.choices]


def test_answers_are_those_of_the_python_api(text_server: Live, text_folder: Any) -> None:
    output = LLM(text_folder).generate(PROMPT, SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2))[0]
    answer = text_server.post("/v1/completions", prompt=PROMPT, logprobs=2, **GREEDY).json()
    choice = answer["choices"][0]
    assert choice["text"] == output.outputs[0].text
    assert choice["token_ids"] == output.outputs[0].token_ids
    assert output.outputs[0].logprobs is not None
    expected = [dict(entries)[i] for i, entries in zip(choice["token_ids"], output.outputs[0].logprobs, strict=True)]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_b29_echo_with_logprobs_is_the_same_every_time(text_server: Live, max_tokens: int) -> None:
    body = {"prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "ignore_eos": True}
    answers = [text_server.post("/v1/completions", **body).json() for _ in range(3)]
    logprobs = [answer["choices"][0]["logprobs"] for answer in answers]
    assert logprobs[0] == logprobs[1] == logprobs[2]
    choice, first = answers[0]["choices"][0], logprobs[0]
    count = answers[0]["usage"]["prompt_tokens"] + max_tokens
    assert all(len(values) == count for values in first.values())
    assert first["token_logprobs"][0] is None
    assert first["top_logprobs"][0] is None
    assert all(value <= 0 for value in first["token_logprobs"][1:])
    assert choice["text"].startswith(PROMPT)
    for token, offset in zip(first["tokens"], first["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token) or "bytes:" in token or not token
    assert answers[0]["usage"]["completion_tokens"] == max_tokens
    assert choice["finish_reason"] == "length"
    stream = text_server.openai.completions.create(model="test", stream=True, **body_for_client(body))
    parts = [chunk.choices[0] for chunk in stream]
    assert "".join(part.text for part in parts) == choice["text"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [x for part in parts if part.logprobs for x in getattr(part.logprobs, name) or []] == first[name]


def test_logprobs_name_tokens_by_id_where_asked(text_server: Live) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "echo": True, "logprobs": 2, **GREEDY}
    by_text = text_server.post("/v1/completions", **body).json()["choices"][0]
    body["return_tokens_as_token_ids"] = True
    by_id = text_server.post("/v1/completions", **body).json()["choices"][0]
    ids = by_id["prompt_token_ids"] + by_id["token_ids"]
    assert by_id["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]
    for token, value, top in zip(
        ids, by_id["logprobs"]["token_logprobs"], by_id["logprobs"]["top_logprobs"], strict=True
    ):
        assert value is None or top[f"token_id:{token}"] == value
    for name in ("token_logprobs", "text_offset"):
        assert by_id["logprobs"][name] == by_text["logprobs"][name]
    assert {**by_id, "logprobs": None} == {**by_text, "logprobs": None}
    lines = text_server.post("/v1/completions", **body, stream=True).text.splitlines()
    parts = [json.loads(line[6:])["choices"][0]["logprobs"] for line in lines if line.startswith("data: {")]
    for name, values in by_id["logprobs"].items():
        assert [value for part in parts for value in part[name]] == values


def test_a_model_without_a_tokenizer_names_tokens_by_id(tiny_folder: Callable[..., Any]) -> None:
    loaded = load(tiny_folder("M*-"), EngineConfig(max_num_seqs=2, max_model_len=64, cache_bytes=8 << 20))
    assert loaded.tokenizer is None
    body: dict[str, Any] = {"prompt": [5, 7, 11], "prompt_logprobs": 1, "logprobs": 2, **GREEDY}
    with serving(Front(loaded.engine, None)) as live:
        refused = live.post("/v1/completions", **body)
        assert (refused.status_code, "no tokenizer" in refused.json()["error"]["message"]) == (400, True)
        assert refused.json()["error"]["param"] == "logprobs"
        assert live.service.engine.stats().prefix.prompts == 0, "it is refused before it runs"
        choice = live.post("/v1/completions", **body, return_tokens_as_token_ids=True).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("", [0] * 6)
    first, *entries = choice["prompt_logprobs"]
    assert first is None
    assert [entry[str(token)]["decoded_token"] for token, entry in zip([7, 11], entries, strict=True)] == [None] * 2


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_an_answer_that_cannot_be_put_together_leaves_nothing_running(
    scripted: Callable[..., Live], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    live = scripted({"hi": [100] * 1500}, plain=path == "completions")

    def broken(*arguments: Any, **more: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("hemiola.serve.completions._logprobs", broken)
    monkeypatch.setattr("hemiola.serve.turn.ChatParser", broken)
    body: dict[str, Any] = {"prompt": "hi"} if path == "completions" else {"messages": HI}
    assert live.post(f"/v1/{path}", **body, max_tokens=1400).status_code == 500
    assert not live.service._generations
    live.settle()
    assert live.service.engine.stats().num_decode_tokens < 1000


def body_for_client(body: dict[str, Any]) -> dict[str, Any]:
    known = dict(body)
    return known | {"extra_body": {"ignore_eos": known.pop("ignore_eos")}} if "ignore_eos" in known else known


def test_echo_of_every_choice_waits_for_the_prompt(text_server: Live) -> None:
    body = {"prompt": ["bada", "kan zi"], "echo": True, "logprobs": 1, "max_tokens": 3, "n": 2, "ignore_eos": True}
    whole = text_server.post("/v1/completions", **body).json()["choices"]
    assert [choice["text"][:4] for choice in whole] == ["bada", "bada", "kan ", "kan "]
    assert all(choice["logprobs"]["token_logprobs"][0] is None for choice in whole)
    shown = texts(text_server, **{k: v for k, v in body.items() if k != "ignore_eos"}, extra_body={"ignore_eos": True})
    assert [shown[index] for index in range(4)] == [choice["text"] for choice in whole]


def test_a_choice_that_comes_before_its_prompts_logprobs(text_server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come with the first choice; in which order choices come is the scheduler's affair."""
    body = {"prompt": "kan zi do", "echo": True, "logprobs": 1, "max_tokens": 3, "n": 2, "ignore_eos": True}
    expected = text_server.post("/v1/completions", **body).json()["choices"]
    front = text_server.service.loop._front
    step = front.step
    monkeypatch.setattr(front, "step", lambda: step()[::-1])
    assert text_server.post("/v1/completions", **body).json()["choices"] == expected


def test_choices_that_end_before_their_prompts_logprobs_end_once(
    text_server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = text_server.service.loop._front
    held: list[Delta] = []
    step = front.step

    def late() -> list[Delta]:
        """Choice 0 comes with the last step, all at once."""
        deltas = step()
        held.extend(delta for delta in deltas if delta.choice.index == 0)
        others = [delta for delta in deltas if delta.choice.index]
        if not any(delta.answer.finished for delta in deltas):
            return others
        ids = [token for delta in held for token in delta.new_ids]
        return [*others, replace(held[-1], text="".join(delta.text for delta in held), new_ids=ids)]

    monkeypatch.setattr(front, "step", late)
    body = {"prompt": "kan zi do", "echo": True, "logprobs": 1, "max_tokens": 3, "n": 2, "ignore_eos": True}
    lines = text_server.post("/v1/completions", **body, stream=True).text.splitlines()
    parts = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    for index in (0, 1):
        reasons = [part["finish_reason"] for part in parts if part["index"] == index]
        assert reasons == [None] * (len(reasons) - 1) + ["length"]


def test_b28_the_stop_text_is_in_neither_answer(scripted: Callable[..., Live]) -> None:
    live = scripted({"do": "bada lo mi fu"}, plain=True)
    for stop, text in ((["lo mi"], "bada "), (["o m", "lo mi f"], "bada l"), (["bada"], "")):
        whole = live.post("/v1/completions", prompt="do", stop=stop).json()["choices"][0]
        assert (whole["text"], whole["finish_reason"]) == (text, "stop")
        assert texts(live, prompt="do", stop=stop)[0] == text
    kept = live.post("/v1/completions", prompt="do", stop="lo mi", include_stop_str_in_output=True).json()
    assert kept["choices"][0]["text"] == "bada lo mi"


@pytest.mark.parametrize(
    ("bias", "param"),
    [
        ({"-1": 1}, "logit_bias['-1']"),
        ({"576": 1}, "logit_bias[576]"),
        ({str(2**31): 1}, f"logit_bias[{2**31}]"),
        ({"abc": 1}, "logit_bias['abc']"),
        ({"5": 1e9}, "logit_bias['5']"),
        ({"5": float("nan")}, "logit_bias.5"),
    ],
)
def test_b30_bad_biases_are_the_clients_error(text_server: Live, bias: dict[str, float], param: str) -> None:
    body = json.dumps({"prompt": PROMPT, "logit_bias": bias})
    answer = text_server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    for good in ("575", "520"):  # the last row of the logits, and one between tokenizer and logits
        assert text_server.post("/v1/completions", prompt=PROMPT, logit_bias={good: 1}, max_tokens=1).status_code == 200


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["bada", ""], [[16, 17], []], [576], [-1], [[16, 2**40]]])
def test_b31_prompts_that_hold_nothing_or_no_token_are_refused(text_server: Live, prompt: Any) -> None:
    answer = text_server.post("/v1/completions", prompt=prompt)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("prompt")
    text_server.settle()


def test_b30_a_good_request_beside_bad_ones_is_not_disturbed(text_server: Live) -> None:
    body = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True}
    alone = text_server.post("/v1/completions", **body).json()["choices"][0]["token_ids"]
    with ThreadPoolExecutor(1) as pool:
        good = pool.submit(text_server.post, "/v1/completions", **body)
        while not good.done():
            for path, prompt in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": HI})):
                for stream in (False, True):
                    answer = text_server.post(path, **prompt, logit_bias={"576": 1}, stream=stream)
                    assert answer.status_code == 400
                    assert answer.json()["error"]["param"] == "logit_bias[576]"
    assert good.result().json()["choices"][0]["token_ids"] == alone


def test_b31_chat_with_empty_content_is_an_answer_and_without_messages_is_none(text_server: Live) -> None:
    for stream in (False, True):
        empty = text_server.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": ""}], max_tokens=2, stream=stream
        )
        assert empty.status_code == 200
        answer = text_server.post("/v1/chat/completions", messages=[], stream=stream)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    text_server.settle()


@pytest.mark.parametrize(
    ("max_tokens", "reason", "text"), [(1, "length", "a"), (2, "length", "ab"), (3, "stop", "ab"), (4, "stop", "ab")]
)
def test_b33_one_rule_for_how_an_answer_ends(
    scripted: Callable[..., Live], max_tokens: int, reason: str, text: str
) -> None:
    live = scripted({"do": [*byte_ids(b"ab"), 11]}, plain=True)
    answer = live.post("/v1/completions", prompt="do", max_tokens=max_tokens, return_token_ids=True).json()
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["text"]) == (reason, text)
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"]) == min(max_tokens, 3)
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(live.openai.completions.create(model="test", prompt="do", max_tokens=max_tokens, **options))
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == [reason]
    assert chunks[-1].usage.completion_tokens == answer["usage"]["completion_tokens"]


def test_b34_characters_split_over_tokens_arrive_whole(scripted: Callable[..., Live]) -> None:
    text = "é👩‍👩‍👧 한국"
    live = scripted({"do": [*byte_ids(text.encode()), 11], "cut": byte_ids("né🎵".encode()[:-1])}, plain=True)
    for prompt, count, expected in (("do", 60, text), ("cut", 6, "né\N{REPLACEMENT CHARACTER}")):
        whole = live.post("/v1/completions", prompt=prompt, max_tokens=count).json()["choices"][0]["text"]
        assert whole == texts(live, prompt=prompt, max_tokens=count)[0] == expected


def test_b33_no_tokens_are_refused_without_echo(text_server: Live) -> None:
    for path, body in (("/v1/completions", {"prompt": "bada"}), ("/v1/chat/completions", {"messages": []})):
        answer = text_server.post(path, **body, max_tokens=0)
        assert answer.status_code == 400
    answer = text_server.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], max_tokens=0)
    assert answer.json()["error"]["param"] == "max_tokens"


def test_what_is_not_supported_says_so(text_server: Live) -> None:
    for field, value in (("suffix", "end"), ("best_of", 2)):
        answer = text_server.post("/v1/completions", prompt="bada", **{field: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
        assert "not supported" in answer.json()["error"]["message"]
    assert text_server.post("/v1/completions", prompt="bada", max_tokens=1, suffix=None).status_code == 200
