"""/v1/chat/completions through the openai client: whole and streamed answers are the same, in the right fields."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from hemiola.text.tokenizer import Tokenizer
from tests.serve.conftest import Live
from tests.support.tiny_tokenizer import byte_ids

HI: Any = [{"role": "user", "content": "hi"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["place"],
        },
    },
}
CALL = "<tool_call>\n<function=weather>\n<parameter=place>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
CALL += "</function>\n</tool_call>"


class Message:
    """A streamed answer put together again, choice 0."""

    def __init__(self, chunks: Any) -> None:
        self.content = self.reasoning = ""
        self.calls: dict[int, dict[str, str]] = {}
        self.finish_reason: str | None = None
        self.usage: Any = None
        self.pieces = 0
        for chunk in chunks:
            self.usage = chunk.usage or self.usage
            for choice in chunk.choices:
                assert choice.index == 0
                self.finish_reason = choice.finish_reason or self.finish_reason
                self.content += choice.delta.content or ""
                self.reasoning += getattr(choice.delta, "reasoning_content", None) or ""
                self.pieces += bool(choice.delta.content)
                for call in choice.delta.tool_calls or []:
                    entry = self.calls.setdefault(call.index, {"name": "", "arguments": ""})
                    entry["name"] += call.function.name or ""
                    entry["arguments"] += call.function.arguments or ""


def both(live: Live, **options: Any) -> tuple[Any, Message]:
    """The same request whole and streamed; what they share is compared here."""
    create: Any = live.openai.chat.completions.create
    options = {"model": "test", "messages": HI, "max_tokens": 64} | options
    whole = create(**options)
    streamed = Message(create(**options, stream=True, stream_options={"include_usage": True}))
    message = whole.choices[0].message
    assert streamed.content == (message.content or "")
    assert streamed.reasoning == (getattr(message, "reasoning_content", None) or "")
    assert streamed.finish_reason == whole.choices[0].finish_reason
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    assert [(call["name"], call["arguments"]) for call in streamed.calls.values()] == calls
    return whole, streamed


def test_reasoning_and_content_arrive_in_their_fields(scripted: Callable[..., Live]) -> None:
    live = scripted({"hi": "so it is\n</think>\nforty two"})
    whole, _ = both(live)
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("so it is", "forty two")
    assert message.reasoning == message.reasoning_content
    assert whole.choices[0].finish_reason == "stop"
    assert 0 < whole.usage.completion_tokens_details.reasoning_tokens < whole.usage.completion_tokens


def test_thinking_off_leaves_all_in_content(scripted: Callable[..., Live]) -> None:
    live = scripted({"hi": "forty two"}, thinking=False)
    whole, streamed = both(live, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert whole.choices[0].message.content == "forty two"
    assert not hasattr(whole.choices[0].message, "reasoning_content")
    assert streamed.pieces > 1, "it was not streamed"
    whole, _ = both(live, reasoning_effort="none")
    assert whole.choices[0].message.content == "forty two"


def test_b35_template_switches_change_the_prompt_and_unknown_ones_are_errors(text_server: Live) -> None:
    ids = {
        switch: text_server.post("/tokenize", messages=HI, chat_template_kwargs={"enable_thinking": switch}).json()
        for switch in (True, False)
    }
    assert ids[True]["tokens"] != ids[False]["tokens"]
    for path, field in (("/tokenize", "thinking"), ("/v1/chat/completions", "messages")):
        answer = text_server.post(path, messages=HI, chat_template_kwargs={field: True})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == f"chat_template_kwargs.{field}"
    answer = text_server.post("/v1/chat/completions", messages=HI, reasoning_effort="low")
    assert answer.json()["error"]["param"] == "reasoning_effort", "this template has no low_effort"


def test_tool_calls_arrive_as_openai_tool_calls(scripted: Callable[..., Live]) -> None:
    live = scripted({"hi": f"let me see\n</think>\n{CALL}"}, tools=[WEATHER], max_model_len=4096)
    whole, _ = both(live, tools=[WEATHER], max_tokens=300)
    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.id
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"place": "Rome", "days": 2}
    assert choice.message.content is None
    assert choice.message.reasoning_content == "let me see"


def test_a_second_call_is_dropped_where_one_is_allowed(scripted: Callable[..., Live]) -> None:
    live = scripted({"hi": f"</think>{CALL}\n{CALL}"}, tools=[WEATHER], max_model_len=4096)
    whole, _ = both(live, tools=[WEATHER], max_tokens=500)
    assert len(whole.choices[0].message.tool_calls) == 2
    whole, streamed = both(live, tools=[WEATHER], max_tokens=500, parallel_tool_calls=False)
    assert len(whole.choices[0].message.tool_calls) == len(streamed.calls) == 1


def test_a_second_call_that_is_dropped_does_not_cut_the_answer_off(scripted: Callable[..., Live]) -> None:
    cut = CALL.partition("</parameter>")[0]
    live = scripted({"hi": f"</think>{CALL}\n{cut}"}, tools=[WEATHER], max_model_len=4096)
    whole, streamed = both(live, tools=[WEATHER], max_tokens=500, parallel_tool_calls=False)
    assert whole.choices[0].finish_reason == "tool_calls"
    assert len(whole.choices[0].message.tool_calls) == len(streamed.calls) == 1
    whole = live.post("/v1/chat/completions", messages=HI, tools=[WEATHER], max_tokens=500).json()
    assert whole["choices"][0]["finish_reason"] == "length", "where it is not dropped, it is cut off"


def test_a_conversation_with_calls_comes_back(text_server: Live) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Rome"}'}}
    messages: Any = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "weather"}, {"type": "text", "text": "in Rome"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm", "refusal": None},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    answer = text_server.openai.chat.completions.create(
        model="test", messages=messages, tools=[WEATHER], max_tokens=4, seed=1
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    prompt = text_server.post("/tokenize", messages=messages, tools=[WEATHER]).json()
    assert prompt["count"] == answer.usage.prompt_tokens
    text = text_server.post("/detokenize", tokens=prompt["tokens"]).json()["prompt"]
    assert "<parameter=place>\nRome\n</parameter>" in text
    assert "be brief" in text
    assert "weather\nin Rome" in text


@pytest.mark.parametrize(
    ("stop", "content"),
    [
        (["lo mi"], "bada "),
        (["o m"], "bada l"),
        (["lo mi", "lo"], "bada "),
        (["bada"], ""),
        (["zzz"], "bada lo mi fu"),
    ],
)
def test_b28_no_part_of_a_stop_is_sent(scripted: Callable[..., Live], stop: list[str], content: str) -> None:
    live = scripted({"hi": "bada lo mi fu"}, thinking=False)
    whole, _ = both(live, stop=stop, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert whole.choices[0].message.content == content
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].stop_reason == (None if stop == ["zzz"] else "lo" if "lo" in stop else stop[0])


@pytest.mark.parametrize(("max_tokens", "reason", "count"), [(1, "length", 1), (2, "length", 2), (3, "stop", 3)])
def test_b33_one_rule_for_how_an_answer_ends(
    scripted: Callable[..., Live], max_tokens: int, reason: str, count: int
) -> None:
    live = scripted({"hi": [100, 101, 11]}, thinking=False)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    whole, _ = both(live, max_tokens=max_tokens, extra_body=off)
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == (reason, count)


def test_b34_characters_split_over_tokens_arrive_whole(scripted: Callable[..., Live]) -> None:
    text = "é👩‍👩‍👧 한국"
    live = scripted({"hi": [*byte_ids(text.encode()), 11], "cut": byte_ids("né🎵".encode()[:-1])}, thinking=False)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    whole, _ = both(live, extra_body=off)
    assert whole.choices[0].message.content == text
    cut = [{"role": "user", "content": "cut"}]
    whole, _ = both(live, messages=cut, max_tokens=6, extra_body=off)
    assert whole.choices[0].message.content == "né\N{REPLACEMENT CHARACTER}"


def test_logprobs_belong_to_the_tokens(text_server: Live) -> None:
    create: Any = text_server.openai.chat.completions.create
    options = {"model": "test", "messages": HI, "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    options["extra_body"] = {"return_token_ids": True, "ignore_eos": True}
    choice = create(**options).choices[0]
    entries = choice.logprobs.content
    assert len(entries) == len(choice.token_ids) == 6
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob, "greedy takes the best"
        assert entry.logprob >= entry.top_logprobs[1].logprob
    chunks = list(create(**options, stream=True))
    streamed = [e for chunk in chunks for c in chunk.choices if c.logprobs for e in c.logprobs.content]
    assert [e.token for e in streamed] == [e.token for e in entries]
    ids = [i for chunk in chunks for c in chunk.choices for i in getattr(c, "token_ids", [])]
    assert ids == choice.token_ids


def test_logprobs_name_tokens_by_id_where_asked(text_server: Live, text_tokenizer: Tokenizer) -> None:
    create: Any = text_server.openai.chat.completions.create
    extra = {"return_token_ids": True, "ignore_eos": True}
    options = {"model": "test", "messages": HI, "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    by_text = create(**options, extra_body=extra).choices[0]
    by_id = create(**options, extra_body=extra | {"return_tokens_as_token_ids": True}).choices[0]
    assert by_id.message == by_text.message
    assert [e.token for e in by_id.logprobs.content] == [f"token_id:{i}" for i in by_text.token_ids]
    for named, entry in zip(by_id.logprobs.content, by_text.logprobs.content, strict=True):
        for ours, theirs in zip([named, *named.top_logprobs], [entry, *entry.top_logprobs], strict=True):
            assert ours.token.startswith("token_id:")
            assert bytes(ours.bytes) == text_tokenizer.token_bytes(int(ours.token.removeprefix("token_id:")))
            assert (ours.bytes, ours.logprob) == (theirs.bytes, theirs.logprob)
    chunks = create(**options, stream=True, extra_body=extra | {"return_tokens_as_token_ids": True})
    streamed = [e for chunk in chunks for c in chunk.choices if c.logprobs for e in c.logprobs.content]
    assert streamed == by_id.logprobs.content


def test_choices_differ_by_seed_and_repeat(text_server: Live) -> None:
    create: Any = text_server.openai.chat.completions.create
    options = {"model": "test", "messages": HI, "max_tokens": 8, "n": 4, "temperature": 1.0, "seed": 5}
    options["extra_body"] = {"return_token_ids": True, "ignore_eos": True}
    first = [tuple(choice.token_ids) for choice in create(**options).choices]
    assert len(set(first)) == 4
    assert first == [tuple(choice.token_ids) for choice in create(**options).choices]
    options["temperature"] = 0.0
    assert len({tuple(choice.token_ids) for choice in create(**options).choices}) == 1
    streamed: dict[int, list[int]] = {}
    for chunk in create(**options | {"temperature": 1.0, "stream": True}):
        for choice in chunk.choices:
            streamed.setdefault(choice.index, []).extend(getattr(choice, "token_ids", []))
    assert [tuple(streamed[index]) for index in range(4)] == first


def test_a_thinking_budget_ends_the_thought(text_server: Live, text_tokenizer: Tokenizer) -> None:
    body = {"messages": HI, "thinking_token_budget": 3, "max_tokens": 16, "ignore_eos": True, "return_token_ids": True}
    choice = text_server.post("/v1/chat/completions", **body).json()["choices"][0]
    end = text_tokenizer.encode("\n</think>\n")
    assert choice["token_ids"][3 : 3 + len(end)] == end
    assert choice["message"]["content"]
    without = text_server.post("/v1/chat/completions", **body | {"thinking_token_budget": None}).json()["choices"][0]
    assert without["token_ids"][:3] == choice["token_ids"][:3]
    assert without["token_ids"] != choice["token_ids"]


def test_vllms_sampling_keys_reach_the_engine(text_server: Live) -> None:
    create: Any = text_server.openai.chat.completions.create
    extra = {"min_tokens": 6, "stop_token_ids": list(range(16, 576)), "return_token_ids": True, "top_k": 2}
    answer = create(model="test", messages=HI, max_tokens=20, temperature=1.0, seed=3, extra_body=extra)
    ids = answer.choices[0].token_ids
    assert 6 <= len(ids) < 20
    extra = {"prompt_logprobs": 1, "repetition_penalty": 1.5, "min_p": 0.1, "return_token_ids": True}
    answer = create(model="test", messages=HI, max_tokens=2, extra_body=extra)
    assert answer.prompt_logprobs[0] is None
    assert len(answer.prompt_logprobs) == len(answer.prompt_token_ids)
    for token, entry in zip(answer.prompt_token_ids[1:], answer.prompt_logprobs[1:], strict=True):
        assert entry[str(token)]["logprob"] <= 0
    bias = {"100": 100.0}
    answer = create(model="test", messages=HI, max_tokens=3, logit_bias=bias, extra_body={"return_token_ids": True})
    assert answer.choices[0].token_ids == [100, 100, 100]


def test_metrics_of_a_request_come_where_they_are_asked_for(text_server: Live) -> None:
    create: Any = text_server.openai.chat.completions.create
    long: Any = [{"role": "user", "content": "lo mi fu " * 40}]
    for _ in range(2):
        answer = create(model="test", messages=long, max_tokens=3, extra_body={"return_metrics": True})
    metrics = answer.metrics
    assert 0 <= metrics["queue_s"] <= metrics["time_to_first_token_s"] <= metrics["time_to_last_token_s"]
    assert metrics["prompts"][0]["cached_tokens"] == answer.usage.prompt_tokens_details.cached_tokens > 0
    assert {path["arm"] for path in metrics["paths"]} == {"reference"}
    answer = create(model="test", messages=long, max_tokens=3)
    assert not hasattr(answer, "metrics")


def test_the_answer_may_take_what_is_left_of_the_context(scripted: Callable[..., Live]) -> None:
    live = scripted({"hi": [100] * 300}, thinking=False, max_model_len=64)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = live.openai.chat.completions.create(model="test", messages=HI, extra_body=off)
    assert answer.usage is not None
    assert answer.usage.total_tokens == 64
    assert answer.choices[0].finish_reason == "length"


def test_the_client_sees_errors_as_its_own_exceptions(text_server: Live) -> None:
    create: Any = text_server.openai.chat.completions.create
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="test", messages=HI, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="other", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        create(model="test", messages=HI, max_tokens=5000, stream=True)
    with pytest.raises(openai.BadRequestError):
        text_server.openai.embeddings.create(model="test", input="x")
