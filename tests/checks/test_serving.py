"""Public bug reports about what a user sees (stops, limits, characters, bad input), through every way to ask.

The ways are `LLM.generate`, `LLM.stream` and `LLM.chat`; servers will be built on the same Front.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hemiola import LLM, SamplingParams
from hemiola.engine.request import FinishReason
from hemiola.errors import CapacityError, RequestError
from hemiola.front import Front
from hemiola.text.tokenizer import Tokenizer
from tests.support.scripted_model import EOS_IDS, ScriptedModel, scripted_front
from tests.support.tiny_tokenizer import byte_ids

WAYS = ("generate", "stream", "chat")
MESSAGES = [{"role": "user", "content": "Sing."}]
every_way = pytest.mark.parametrize("way", WAYS)
VOCAB, TOKENIZER_SIZE = 576, 512


@dataclass(frozen=True)
class Answer:
    """What came back. pieces: the texts of a stream, or the one text of an answer that came whole."""

    text: str
    ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    pieces: list[str]


Ask = Callable[..., Answer]


@pytest.fixture(scope="module")
def llm(text_folder: Path) -> LLM:
    """Without prefix caching: the models that speak through it know nothing of each other's states."""
    return LLM(text_folder, max_num_seqs=4, cache_bytes=8 << 20, prefix_caching=False)


@pytest.fixture(scope="module")
def tokenizer(llm: LLM) -> Tokenizer:
    assert llm.loaded.tokenizer is not None
    return llm.loaded.tokenizer


@pytest.fixture
def ask(llm: LLM, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Asks in one of the ways, of a model that is told what to say; afterwards nothing may be held."""

    def run(way: str, script: Sequence[int], **params: Any) -> Answer:
        prompt = tokenizer.apply_chat_template(MESSAGES) if way == "chat" else "A prompt"
        scripts = {tuple(tokenizer.encode(prompt)): script}
        engine = llm.loaded.engine
        scripted = ScriptedModel(scripts, VOCAB)
        monkeypatch.setattr(engine, "model", scripted)
        monkeypatch.setattr(engine.runner, "model", scripted)
        try:
            answer = collect(llm, way, prompt, SamplingParams(**params))
        finally:
            monkeypatch.undo()
        assert_idle(llm.front)
        return answer

    return run


def collect(llm: LLM, way: str, prompt: str, params: SamplingParams) -> Answer:
    if way == "stream":
        deltas = list(llm.stream(prompt, params))
        request = deltas[-1].choice.request
        reason = request.finish_reason.value if request.finish_reason else None
        ids = [token for delta in deltas for token in delta.new_ids]
        assert ids == request.output_ids
        pieces = [delta.text for delta in deltas]
        return Answer("".join(pieces), ids, reason, request.stop_reason, pieces)
    (output,) = llm.chat(MESSAGES, params) if way == "chat" else llm.generate(prompt, params)
    (choice,) = output.outputs
    return Answer(choice.text, choice.token_ids, choice.finish_reason, choice.stop_reason, [choice.text])


def assert_idle(front: Front) -> None:
    """No request, block or state slot is held."""
    scheduler = front.engine.scheduler
    scheduler.check_integrity()
    assert not front.has_unfinished
    assert not front.engine.has_unfinished
    assert not scheduler.waiting
    assert not scheduler.running
    assert scheduler.blocks.num_free == scheduler.blocks.size
    assert scheduler.slots.num_free == scheduler.slots.size


# B28

# The answer, the stops, the text that may be seen, and the stop that ends it.
STOPS: dict[str, tuple[str, list[str], str, str]] = {
    "over several tokens": ("one END two", ["END"], "one ", "END"),
    "the shorter of two is complete first": ("xEND", ["END", "EN"], "x", "EN"),
    "of two that end together the longer": ("xABC", ["BC", "ABC"], "x", "ABC"),
    "at the very first token": ("STOP more", ["S"], "", "S"),
    "begins in the first token": ("STOP more", ["STOP"], "", "STOP"),
    "a false start": ("ENEND.", ["END"], "EN", "END"),
    "a beginning that comes to nothing": ("ENx.", ["END", "."], "ENx", "."),
    "a character of two tokens": ("a\xe9b", ["\xe9"], "a", "\xe9"),
}


@every_way
@pytest.mark.parametrize("case", STOPS)
def test_b28_no_part_of_a_stop_is_seen(ask: Ask, tokenizer: Tokenizer, way: str, case: str) -> None:
    """The answer as one id per byte, and as the tokenizer cuts it."""
    whole, stops, text, stop = STOPS[case]
    for script in (byte_ids(whole.encode()), tokenizer.encode(whole)):
        answer = ask(way, [*script, *byte_ids(b" and so on")], stop=stops, max_tokens=60)
        assert answer.text == text
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
        assert stop in tokenizer.decode(answer.ids), "all ids that were used are there"
        assert stop not in tokenizer.decode(answer.ids[:-1]), "and none after the stop"


@every_way
def test_b28_merged_tokens(ask: Ask, tokenizer: Tokenizer, way: str) -> None:
    """Tokens of several characters, with a stop over two of them and one that begins inside of a token."""
    script = tokenizer.encode(" banana fanta banana")
    texts = [tokenizer.decode([token]) for token in script]
    wide = next(i for i, text in enumerate(texts[:-1]) if i and len(text) > 1 and len(texts[i + 1]) > 1)
    for stop in (texts[wide] + texts[wide + 1], texts[wide][1:] + texts[wide + 1][0]):
        whole = "".join(texts)
        answer = ask(way, script, stop=stop)
        assert answer.text == whole[: whole.index(stop)]
        assert answer.finish_reason == "stop"
        assert len(answer.ids) == wide + 2
        included = ask(way, script, stop=stop, include_stop_str_in_output=True)
        assert included.text == whole[: whole.index(stop) + len(stop)]


# B30


@every_way
@pytest.mark.parametrize(
    "bias",
    [{-1: 1.0}, {VOCAB: 1.0}, {2**31: 1.0}, {"abc": 1.0}, {5: 1e9}, {5: float("nan")}],
    ids=["-1", "vocab_size", "2^31", "abc", "1e9", "NaN"],
)
def test_b30_a_bad_bias_is_that_requests_error(llm: LLM, way: str, bias: dict[Any, float]) -> None:
    with pytest.raises(RequestError, match=r"logit_bias\[.*" + str(next(iter(bias))).replace("-", r"\-")):
        collect(llm, way, "x", SamplingParams(logit_bias=bias, max_tokens=2))
    assert_idle(llm.front)


def test_b30_the_neighbour_is_not_disturbed(llm: LLM) -> None:
    """A bad request arrives while a good one is running."""
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3, ignore_eos=True)
    ids = [5, 6, 7, 8]
    alone = llm.generate([ids], params)[0].outputs[0].token_ids
    answer = llm.front.add(ids, params)
    for token_id in (VOCAB, 2**31):
        llm.front.step()
        with pytest.raises(RequestError, match="no such token id"):
            llm.front.add(ids, SamplingParams(logit_bias={token_id: 1.0}))
    while llm.front.has_unfinished:
        llm.front.step()
    assert answer.choices[0].request.output_ids == alone
    assert_idle(llm.front)


@every_way
@pytest.mark.parametrize("token_id", [VOCAB - 1, TOKENIZER_SIZE, TOKENIZER_SIZE - 1])
def test_b30_ids_up_to_the_last_row_of_logits_work(llm: LLM, way: str, token_id: int) -> None:
    """Also those between the tokenizer's last entry and the padded size: they are ids, and have no text."""
    answer = collect(llm, way, "x", SamplingParams(logit_bias={token_id: 100.0}, max_tokens=3))
    assert answer.ids == [token_id] * 3
    assert (answer.text == "") == (token_id >= TOKENIZER_SIZE)


# B31


@pytest.mark.parametrize("prompts", ["", [""], [[]], ["good", "", "good"], [[5, 6], []], ["good", []]], ids=repr)
def test_b31_an_empty_prompt_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.generate(prompts)
    assert_idle(llm.front)
    assert llm.generate("good", SamplingParams(max_tokens=2))[0].outputs[0].finish_reason


def test_b31_an_empty_stream_is_refused(llm: LLM) -> None:
    for prompt in ("", []):
        with pytest.raises(RequestError, match="the prompt is empty"):
            next(llm.stream(prompt))
    assert_idle(llm.front)


def test_b31_no_prompts_no_answers(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_b31_chat_with_empty_content_or_no_messages(llm: LLM) -> None:
    """Empty content is a turn like any other."""
    (output,) = llm.chat([{"role": "user", "content": ""}], SamplingParams(max_tokens=2))
    assert output.outputs[0].token_ids
    with pytest.raises(RequestError, match="a conversation without messages"):
        llm.chat([])
    assert_idle(llm.front)


# B33

BODY = byte_ids(b"abcdef")


@every_way
@pytest.mark.parametrize(
    ("script", "params", "reason", "count", "text"),
    [
        (BODY, {"max_tokens": 1}, "length", 1, "a"),
        (BODY, {"max_tokens": 2}, "length", 2, "ab"),
        ([*BODY[:3], EOS_IDS[0]], {"max_tokens": 4}, "stop", 4, "abc"),
        ([*BODY[:3], EOS_IDS[1]], {"max_tokens": 4}, "stop", 4, "abc"),
        ([*BODY[:3], EOS_IDS[1]], {"max_tokens": 3}, "length", 3, "abc"),
        ([EOS_IDS[0]], {"max_tokens": 1}, "stop", 1, ""),
        ([EOS_IDS[0], *BODY], {"max_tokens": 3, "ignore_eos": True}, "length", 3, "ab"),
        (BODY, {"max_tokens": 3, "stop": "bc"}, "stop", 3, "a"),
        (BODY, {"max_tokens": 2, "stop": "bc"}, "length", 2, "ab"),
        (BODY, {"max_tokens": 3, "stop_token_ids": [BODY[2]]}, "stop", 3, "ab"),
        (BODY, {"max_tokens": 2, "stop_token_ids": [BODY[2]]}, "length", 2, "ab"),
        ([BODY[0], 2, *BODY[1:]], {"max_tokens": 5, "stop_token_ids": [2], "ignore_eos": True}, "stop", 2, "a"),
    ],
)
def test_b33_one_rule_for_the_finish_reason(
    ask: Ask, way: str, script: list[int], params: dict[str, Any], reason: str, count: int, text: str
) -> None:
    answer = ask(way, script, **params)
    assert (answer.finish_reason, len(answer.ids), answer.text) == (reason, count, text)


def test_b33_no_tokens_at_all_is_refused() -> None:
    with pytest.raises(RequestError, match="max_tokens"):
        SamplingParams(max_tokens=0)


# B34

TEXTS = {
    "emoji": "a\U0001f600b",
    "family": "\U0001f468‍\U0001f469‍\U0001f467‍\U0001f466!",
    "korean": "안녕하세요",
    "accents": "naïve café e\u0301",
}


@every_way
@pytest.mark.parametrize("name", TEXTS)
def test_b34_characters_over_several_tokens(ask: Ask, tokenizer: Tokenizer, way: str, name: str) -> None:
    """Cut after every token, so that some answers end in half a character."""
    data = TEXTS[name].encode()
    for script in (byte_ids(data), tokenizer.encode(TEXTS[name])):
        for count in range(1, len(script) + 1):
            answer = ask(way, script, max_tokens=count)
            assert answer.text == tokenizer.decode(script[:count])
            assert ("\ufffd" in answer.text) == (tokenizer.decode(script[:count]).endswith("\ufffd"))
            assert all("\ufffd" not in piece for piece in answer.pieces[:-1])
        assert answer.text == TEXTS[name]
    cut = ask(way, byte_ids(data[:-1]), max_tokens=len(data) - 1)
    assert cut.text == data[:-1].decode(errors="replace")


def test_b34_an_end_after_half_a_character(ask: Ask) -> None:
    texts = {ask(way, [*byte_ids("é".encode()[:1]), EOS_IDS[0]], max_tokens=5).text for way in WAYS}
    assert texts == {"\ufffd"}


# Several answers at once


def test_streams_side_by_side_lose_nothing(llm: LLM) -> None:
    """Two streams and a whole generation take turns at one engine; each stream still shows all of its own answer."""
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=1, ignore_eos=True)
    prompts = ["first prompt", "the second"]
    want = [llm.generate(prompt, params)[0].outputs[0] for prompt in prompts]
    streams = [llm.stream(prompt, params) for prompt in prompts]
    deltas = [[next(stream), next(stream)] for stream in streams]
    llm.generate("a third", SamplingParams(max_tokens=3, ignore_eos=True))
    for mine, stream in zip(deltas, streams, strict=True):
        mine += stream
    for mine, whole in zip(deltas, want, strict=True):
        assert [token for delta in mine for token in delta.new_ids] == whole.token_ids
        assert "".join(delta.text for delta in mine) == whole.text
    assert_idle(llm.front)


def test_a_stream_of_several_choices(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=9, temperature=1.0, seed=4, ignore_eos=True)
    (whole,) = llm.generate("a prompt", params)
    deltas = list(llm.stream("a prompt", params))
    for choice in whole.outputs:
        mine = [delta for delta in deltas if delta.choice.index == choice.index]
        assert [token for delta in mine for token in delta.new_ids] == choice.token_ids
        assert "".join(delta.text for delta in mine) == choice.text


def test_a_stream_that_is_left_frees_everything(llm: LLM) -> None:
    stream = llm.stream("some prompt", SamplingParams(max_tokens=50, ignore_eos=True))
    request = next(stream).choice.request
    stream.close()
    assert request.finish_reason is FinishReason.ABORT
    assert_idle(llm.front)


@pytest.mark.parametrize(
    ("bad", "params", "error", "text"),
    [
        ("", {}, RequestError, "the prompt is empty"),
        ([5, VOCAB], {}, RequestError, f"token id outside the vocabulary; found {VOCAB} at position 1"),
        ([5, -1], {}, RequestError, "token id outside the vocabulary"),
        ([5, "six"], {}, RequestError, "not a token id; found 'six'"),
        ([5, True], {}, RequestError, "not a token id"),
        ([5] * 5000, {}, CapacityError, r"5000 prompt \+ 4 output = 5004 tokens; expected at most max_model_len 4096"),
        ("good", {"stop_token_ids": [VOCAB]}, RequestError, r"stop_token_ids\[0\]: no such token id"),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_bad_prompt_among_good_ones(
    llm: LLM, bad: Any, params: dict[str, Any], error: type[Exception], text: str, place: int
) -> None:
    """A typed error before anything runs, nothing left queued, and the next call works."""
    prompts: list[Any] = ["good", "good"]
    prompts.insert(place, bad)
    each = [SamplingParams(max_tokens=4)] * 3
    each[place] = SamplingParams(max_tokens=4, **params)
    before = llm.path_counts()
    with pytest.raises(error, match=text):
        llm.generate(prompts, each)
    assert llm.path_counts() == before, "something ran"
    assert_idle(llm.front)
    assert len(llm.generate(["good", "good"], SamplingParams(max_tokens=4))) == 2


def test_as_many_params_as_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="as many sampling_params as prompts are needed; found 1; expected 2"):
        llm.generate(["a", "b"], [SamplingParams()])


def test_an_interrupted_generation_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a step."""
    forward, calls = llm.loaded.engine.model.forward, []

    def interrupted(*args: Any) -> torch.Tensor:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(*args)

    monkeypatch.setattr(llm.loaded.engine.model, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one", "two"], SamplingParams(max_tokens=9, ignore_eos=True))
    assert_idle(llm.front)


def test_the_scripted_model_says_its_script() -> None:
    """The stub itself: a prompt in one piece or many, two at once, and an end that is missed is an error."""
    scripts = {(5, 6, 7, 8, 9): [20, 21, 22], (5, 6): [30, 31]}
    for budget in (1, 2, 64):
        front = scripted_front(scripts, max_num_batched_tokens=budget)
        answers = [front.add(prompt, SamplingParams(max_tokens=len(said))) for prompt, said in scripts.items()]
        while front.has_unfinished:
            front.step()
        assert [answer.choices[0].request.output_ids for answer in answers] == list(scripts.values())
        assert_idle(front)
    front.add((5, 6), SamplingParams(max_tokens=3))
    for _ in range(2):
        front.step()
    with pytest.raises(AssertionError, match="nothing is scripted here"):
        front.step()
