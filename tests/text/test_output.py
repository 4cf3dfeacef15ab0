"""OutputText: stop strings over token edges, streamed text equal to the whole, what counts and what is shown."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hemiola.config.sampling import SamplingParams
from hemiola.text.output import OutputText
from hemiola.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import byte_ids

EMOJI = "\N{GRINNING FACE}"


def run(tokenizer: Tokenizer, pushes: list[list[int]], **fields: Any) -> tuple[list[str], OutputText]:
    output = OutputText(tokenizer, SamplingParams(**fields))
    shown = [output.push(ids) for ids in pushes]
    shown.append(output.finish())
    assert "".join(shown) == output.text
    return shown, output


def singles(ids: list[int]) -> list[list[int]]:
    return [[token_id] for token_id in ids]


@pytest.mark.parametrize(
    ("text", "stop", "expected", "hit", "num_tokens"),
    [
        ("one END two", ["END"], "one ", "END", 7),
        ("one END two", ["E", "END"], "one ", "E", 5),
        ("one END two", ["END t", "ND"], "one E", "ND", 7),
        ("one END two", ["one"], "", "one", 3),
        ("one END two", ["o"], "", "o", 1),
        ("one EN", ["END"], "one EN", None, 6),
        (f"one {EMOJI}!", [EMOJI], "one ", EMOJI, 8),
    ],
)
def test_stops_over_token_edges(
    tokenizer: Tokenizer, text: str, stop: list[str], expected: str, hit: str | None, num_tokens: int
) -> None:
    """One id per byte: every stop of more than one byte spans several ids."""
    for pushes in (singles(byte_ids(text.encode())), [byte_ids(text.encode())]):
        shown, output = run(tokenizer, pushes, stop=stop)
        assert (output.text, output.stopped, output.num_tokens) == (expected, hit, num_tokens)
        assert not any(character in "".join(shown) for character in (hit or ""))


def test_a_stop_that_begins_in_the_middle_of_a_token(tokenizer: Tokenizer) -> None:
    token = next(i for i in range(300, 512) if len(tokenizer.decode([i])) >= 4)
    text = tokenizer.decode([token])
    stop = text[2:] + "!"
    shown, output = run(tokenizer, [[token], byte_ids(b"!"), byte_ids(b"x")], stop=stop)
    assert shown == [text[:2], "", "", ""]
    assert (output.stopped, output.num_tokens) == (stop, 2)
    assert run(tokenizer, [[token], byte_ids(b"?")], stop=stop)[0] == [text[:2], text[2:] + "?", ""]


def test_the_stop_is_included_when_asked(tokenizer: Tokenizer) -> None:
    ids = byte_ids(b"one END two")
    for pushes in (singles(ids), [ids]):
        _, output = run(tokenizer, pushes, stop=["END"], include_stop_str_in_output=True)
        assert (output.text, output.num_tokens) == ("one END", 7)


def test_nothing_follows_a_stop(tokenizer: Tokenizer) -> None:
    output = OutputText(tokenizer, SamplingParams(stop="b"))
    assert output.push(byte_ids(b"abc")) == "a"
    assert output.push(byte_ids(b"b" + EMOJI.encode()[:2])) == ""
    assert output.finish() == ""
    assert (output.text, output.num_tokens, output.stopped) == ("a", 2, "b")


def test_stops_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    """A stop lies wholly behind the first min_tokens ids, whose text has gone out already."""
    ids = byte_ids(b"END END")
    assert run(tokenizer, [ids], stop="END", min_tokens=2)[1].text == "END "
    assert run(tokenizer, [ids], stop="END", min_tokens=4)[1].text == "END "
    assert run(tokenizer, [ids], stop="END", min_tokens=5)[1].stopped is None
    assert run(tokenizer, [ids], stop="END", min_tokens=5)[1].text == "END END"


def test_the_id_that_ends_a_request_counts_but_shows_nothing(tokenizer: Tokenizer) -> None:
    """Also where the id has a text of its own, because it is not special or special tokens are shown."""
    for fields, expected in (
        ({}, "ab"),
        ({"skip_special_tokens": False}, "ab"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "ab<|im_end|>"),
    ):
        output = OutputText(tokenizer, SamplingParams(**fields))  # type: ignore[arg-type]
        output.push(byte_ids(b"a"))
        output.push([*byte_ids(b"b"), 11], ends=True)
        output.finish()
        assert (output.text, output.num_tokens, output.stopped) == (expected, 3, None)


def test_withheld_text_goes_out_when_an_end_id_follows(tokenizer: Tokenizer) -> None:
    output = OutputText(tokenizer, SamplingParams(stop="bc"))
    assert output.push(byte_ids(b"ab")) == "a"
    assert output.push([2], ends=True) == ""
    assert output.finish() == "b"


def test_an_answer_that_ends_in_half_a_character(tokenizer: Tokenizer) -> None:
    ids = byte_ids(b"a" + EMOJI.encode()[:3])
    shown, output = run(tokenizer, singles(ids), stop=["zz"])
    assert shown == ["a", "", "", "", "\ufffd"]
    assert output.text == tokenizer.decode(ids)


def test_special_tokens_are_shown_when_asked(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<s>b<think>")
    assert run(tokenizer, [ids])[1].text == "ab<think>"
    assert run(tokenizer, [ids], skip_special_tokens=False)[1].text == "a<s>b<think>"


def test_no_ids_no_text(tokenizer: Tokenizer) -> None:
    assert run(tokenizer, [], stop="a")[0] == [""]
    assert run(tokenizer, [[]], stop="a")[0] == ["", ""]


ANSWER = st.lists(st.sampled_from(["a", "b", "ab", "é", EMOJI, "</s>", "<think>", " "]), max_size=12).map("".join)
STOP = st.lists(st.text(alphabet=f"abé{EMOJI} <", min_size=1, max_size=4), max_size=3)


@given(ANSWER, STOP, st.booleans(), st.booleans(), st.lists(st.integers(1, 4), max_size=20), st.integers(0, 4))
@settings(max_examples=800, deadline=None)
def test_streamed_equals_whole(
    tokenizer: Tokenizer,
    answer: str,
    stop: list[str],
    by_byte: bool,
    include: bool,
    sizes: list[int],
    dropped: int,
) -> None:
    """However the ids are cut into pushes, text, stop and count are those of one push; and they are right."""
    ids = byte_ids(answer.encode()) if by_byte else tokenizer.encode(answer)
    ids = ids[: len(ids) - dropped] if dropped else ids
    fields: dict[str, Any] = {"stop": stop, "include_stop_str_in_output": include}
    pushes, at = [], 0
    for size in sizes:
        pushes.append(ids[at : at + size])
        at += size
    pushes.append(ids[at:])
    (_, cut), (_, whole) = run(tokenizer, pushes, **fields), run(tokenizer, [ids], **fields)
    assert (cut.text, cut.stopped, cut.num_tokens) == (whole.text, whole.stopped, whole.num_tokens)
    full = tokenizer.decode(ids)
    assert full.startswith(whole.text)
    if whole.stopped is None:
        assert whole.text == full
        assert not any(s in full for s in stop)
    else:
        before = whole.text.removesuffix(whole.stopped) if include else whole.text
        assert full.startswith(before + whole.stopped)
        assert not any(s in before for s in stop)
