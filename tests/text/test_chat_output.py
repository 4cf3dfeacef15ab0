"""The chat parser over ids: marks that are tokens against the same words in prose, dropped marks, late text."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hemiola.config.sampling import SamplingParams
from hemiola.text.chat_output import ChatFormat, chat_format
from hemiola.text.output import OutputText
from hemiola.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import byte_ids
from tests.text.answers import TOOLS, V2, V3, Parsed, parse, xml_call
from tests.text.conftest import TEMPLATE_FILE

MARKS = {12: "<think>", 13: "</think>", 14: "<tool_call>", 15: "</tool_call>"}
SHIPPED = Path(__file__).parents[2] / "hemiola" / "shipped"


def ids_of(text: str) -> list[int]:
    """Ids with every mark as its own token, and one id per byte of all else."""
    ids: list[int] = []
    while text:
        found = [(text.index(mark), token_id) for token_id, mark in MARKS.items() if mark in text]
        end, token_id = min(found, default=(len(text), -1))
        ids += byte_ids(text[:end].encode())
        ids += [token_id] if token_id >= 0 else []
        text = text[end + len(MARKS.get(token_id, "")) :]
    return ids


def say(tokenizer: Tokenizer, ids: list[int], params: SamplingParams, size: int = 1, **options: bool) -> Parsed:
    """What clients get of an answer of `ids`, said `size` at a time and turned into text as the front does it."""
    return say_parts(tokenizer, [ids[start : start + size] for start in range(0, len(ids), size)], params, **options)


def say_parts(tokenizer: Tokenizer, parts: list[list[int]], params: SamplingParams, **options: bool) -> Parsed:
    output = OutputText(tokenizer, params)
    pieces: list[tuple[str, list[int]]] = []
    for new in parts:
        pieces.append((output.push(new), new))
        if output.stopped:
            break
    pieces.append((output.finish(), []))
    return parse(pieces, tokenizer=tokenizer, skip_special_tokens=params.skip_special_tokens, **options)


@pytest.fixture(scope="module")
def shipped() -> Tokenizer:
    tokenizer = Tokenizer.from_folder(SHIPPED)
    assert tokenizer is not None
    return tokenizer


ANSWER = "plan</think>\nOk.\n" + xml_call("write", path="ä", content="😀\n<b>") + xml_call("now")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", ["kept marks", "dropped marks"])
def test_marks_are_known_by_their_ids(
    tokenizer: Tokenizer, shipped: Tokenizer, kind: str, skip: bool, size: int
) -> None:
    """The shipped model's tokenizer drops its marks as special tokens, the tiny one's keeps them, as Nemotron-3's."""
    own = tokenizer if kind == "kept marks" else shipped
    ids = own.encode(ANSWER, add_special_tokens=False)
    assert ids.count(14) == 2, "marks are tokens"
    parsed = say(own, ids, SamplingParams(skip_special_tokens=skip), size)
    assert parsed.shown == ("plan", "Ok.", [("write", {"path": "ä", "content": "😀\n<b>"}), ("now", {})])


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_the_same_words_spelled_out_are_prose(tokenizer: Tokenizer, size: int) -> None:
    thought = "say </think> or <tool_call>\n<function=now>\n</function>"
    answer = "then <think>, </think> and <tool_call>\n</tool_call>"
    ids = [*byte_ids(thought.encode()), 13, *byte_ids(answer.encode())]
    assert say(tokenizer, ids, SamplingParams(), size).shown == (thought, answer, [])


def test_a_spelled_call_mark_in_a_value_is_the_values(tokenizer: Tokenizer) -> None:
    value = "a\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
    ids = [
        13,
        14,
        *byte_ids(f"\n<function=write>\n<parameter=content>\n{value}\n</parameter>\n</function>\n".encode()),
        15,
    ]
    assert say(tokenizer, ids, SamplingParams()).calls == [("write", {"content": value})]


def test_text_that_lags_behind_its_ids(tokenizer: Tokenizer) -> None:
    """What may begin a stop string is withheld while ids go on: marks stay where they are."""
    ids = [*byte_ids(b"ab"), 13, *byte_ids(b"</think>ab")]
    for stop in ["ab</think></think>abc", "b</think>x"]:
        assert say(tokenizer, ids, SamplingParams(stop=[stop])).shown == ("ab", "</think>ab", [])


def test_a_stop_string_cuts_before_a_mark_that_came_with_it(tokenizer: Tokenizer) -> None:
    ids = [*byte_ids(b"abSTOP"), 13, *byte_ids(b"cd")]
    assert say(tokenizer, ids, SamplingParams(stop=["STOP"]), size=1000).shown == ("ab", "", [])


def test_a_mark_after_half_a_character(tokenizer: Tokenizer) -> None:
    ids = [*byte_ids("aé".encode())[:-1], 13, *byte_ids(b"b")]
    assert say(tokenizer, ids, SamplingParams()).shown == ("a\ufffd", "b", [])


FRAGMENTS = st.sampled_from(
    [*MARKS.values(), "\n", "é", "<think", "<function=write>", "</function>", "<parameter=path>", "</parameter>", "x "]
)


@given(st.lists(FRAGMENTS, max_size=20), st.booleans(), st.integers(1, 9))
def test_ids_and_text_agree_where_every_mark_is_meant(
    tokenizer: Tokenizer, fragments: list[str], thinking: bool, size: int
) -> None:
    text = "".join(fragments)
    assert (
        say(tokenizer, ids_of(text), SamplingParams(), size, thinking=thinking).all
        == parse([text], thinking=thinking).all
    )


WIDE = (
    "Grüße 😀</think>\nÄ<b> 한\n"
    + xml_call("write", path="ä/é", content='x\n</parameter> "한" 😀')
    + xml_call("now")
    + "Ende 👩‍👧"
)


@pytest.mark.parametrize("as_tokens", [True, False], ids=["marks are tokens", "marks are spelled"])
def test_cutting_at_any_byte_changes_nothing(tokenizer: Tokenizer, as_tokens: bool) -> None:
    """One id per byte, so that a cut may stand inside of a character; also of the answer's beginnings."""
    params, ids = SamplingParams(), ids_of(WIDE) if as_tokens else byte_ids(WIDE.encode())
    whole = say_parts(tokenizer, [ids], params)
    assert not as_tokens or (whole.reasoning, len(whole.calls)) == ("Grüße 😀", 2)
    for cut in range(len(ids) + 1):
        assert say_parts(tokenizer, [ids[:cut], ids[cut:]], params).all == whole.all, f"cut at {cut}"
        beginning = say_parts(tokenizer, [ids[:cut]], params, cut=True)
        assert say(tokenizer, ids[:cut], params, cut=True).all == beginning.all, f"the first {cut} bytes"


@given(st.lists(FRAGMENTS, max_size=16), st.booleans(), st.booleans(), st.booleans(), st.data())
def test_any_bytes_parse_alike_however_they_are_cut(
    tokenizer: Tokenizer, fragments: list[str], as_tokens: bool, thinking: bool, cut: bool, data: st.DataObject
) -> None:
    text = "".join(fragments)
    ids = ids_of(text) if as_tokens else byte_ids(text.encode())
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)))))
    parts = [ids[a:b] for a, b in itertools.pairwise([0, *cuts, len(ids)])]
    whole = say_parts(tokenizer, [ids], SamplingParams(), thinking=thinking, cut=cut)
    assert say_parts(tokenizer, parts, SamplingParams(), thinking=thinking, cut=cut).all == whole.all
    assert say(tokenizer, ids, SamplingParams(), thinking=thinking, cut=cut).all == whole.all


OUTPUTS = [
    before + between + after
    for before, between, after in itertools.product(
        ["", "<think>", "thought"], ["", "</think>", "</think>\n\n", "</think></think>", "<think></think>"], ["", "42"]
    )
]


@pytest.mark.parametrize("text", OUTPUTS)
def test_b42_content_holds_no_think_marks(text: str) -> None:
    quotes = text.startswith("thought<think>")  # a pair in prose, where the answer begins as content
    for thinking in (True,) if quotes else (True, False):
        assert "think>" not in parse([text], thinking=thinking).content


def test_the_format_follows_from_the_template() -> None:
    assert chat_format(TEMPLATE_FILE.read_text(encoding="utf-8")) == V3
    assert chat_format("{% if tools %}<AVAILABLE_TOOLS>{% endif %}<TOOLCALL>...<think>") == V2
    assert chat_format("{{ messages }}") == chat_format(None) == ChatFormat(reasoning=False, tools=None)


def test_tools_of_a_model_without_a_format_are_no_calls() -> None:
    text = xml_call("now")
    assert parse([text], format=ChatFormat(), tools=TOOLS, thinking=False).shown == ("", text, [])
