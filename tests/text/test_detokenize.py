"""Detokenizer: pieces joined equal the whole decoding, and no character is shown by halves (B34)."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from hemiola.text.detokenize import Detokenizer
from hemiola.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import byte_ids

MARK = "\ufffd"
EMOJI = "\N{GRINNING FACE}"
FAMILY = "\N{MAN}\u200d\N{WOMAN}\u200d\N{GIRL}\u200d\N{BOY}"
TEXTS = {
    "emoji": EMOJI,
    "family": FAMILY,
    "korean": "안녕하세요 세계",
    "accented": "Crème brûlée à la façon de Zoë, e\u0301",
    "mixed": f"a{EMOJI}b {FAMILY}한\nπ=3 \U0001f1e9\U0001f1ea.",
    "literal_mark": f"a{MARK}b{MARK}{MARK}",
}


def pieces(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    """What each id shows, and then what is left at the end."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("by_byte", [True, False])
def test_text_cut_at_every_id(tokenizer: Tokenizer, name: str, by_byte: bool) -> None:
    """Also cut off after every id, which may be in the middle of a character."""
    text = TEXTS[name]
    ids = byte_ids(text.encode()) if by_byte else tokenizer.encode(text)
    assert "".join(pieces(tokenizer, ids)) == text
    for end in range(len(ids) + 1):
        shown = pieces(tokenizer, ids[:end])
        whole = tokenizer.decode(ids[:end])
        assert "".join(shown) == whole
        if MARK not in text:
            assert MARK not in "".join(shown[:-1])
            assert MARK not in whole or shown[-1] == MARK


def test_each_character_is_shown_with_its_last_byte(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, byte_ids(f"a{EMOJI}é".encode())) == ["a", "", "", "", EMOJI, "", "é", ""]


def test_half_a_character_is_a_mark_only_at_the_end(tokenizer: Tokenizer) -> None:
    cut = byte_ids(EMOJI.encode()[:3])
    assert pieces(tokenizer, cut) == ["", "", "", MARK]
    assert pieces(tokenizer, [*cut, *byte_ids(b"a")]) == ["", "", "", f"{MARK}a", ""]


def test_broken_bytes_do_not_hold_back_what_is_settled(tokenizer: Tokenizer) -> None:
    """Each stray byte is known to be one when the next arrives."""
    shown = pieces(tokenizer, byte_ids(b"\xff\xff\xe2\xe2a"))
    assert shown == ["", MARK, MARK, MARK, f"{MARK}a", ""]


@given(st.binary(max_size=24))
@settings(max_examples=500, deadline=None)
def test_any_bytes_equal_the_whole_decoding(tokenizer: Tokenizer, data: bytes) -> None:
    ids = byte_ids(data)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == data.decode("utf-8", errors="replace")


@given(st.lists(st.integers(0, 600), max_size=30), st.booleans())
@settings(max_examples=500, deadline=None)
def test_any_ids_equal_the_whole_decoding(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool) -> None:
    """Merges, special tokens (also inside of a character), kept ones, and ids past the vocabulary."""
    shown = pieces(tokenizer, ids, skip_special_tokens)
    assert "".join(shown) == tokenizer.decode(ids, skip_special_tokens)
    for end in range(len(ids)):
        assert tokenizer.decode(ids, skip_special_tokens).startswith("".join(shown[:end]))


def test_special_tokens_inside_of_a_character(tokenizer: Tokenizer) -> None:
    first, second = byte_ids("é".encode())
    assert "".join(pieces(tokenizer, [first, 2, second])) == "é"
    assert "".join(pieces(tokenizer, [first, 2, second], skip_special_tokens=False)) == f"{MARK}</s>{MARK}"


def test_long_text_keeps_no_ids(tokenizer: Tokenizer) -> None:
    """The cost of an id does not grow with the answer."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    for token_id in tokenizer.encode("some text " * 50):
        detokenizer.push(token_id)
    assert detokenizer._pending_ids == []


@given(
    st.lists(st.sampled_from([*b"\xff\x80\xbf\xe2\xed\xf0\xf4\x90\xef\xbb\xbd\xc3", None]), min_size=20, max_size=60)
)
@settings(max_examples=500, deadline=None)
def test_long_broken_text_equals_the_whole_decoding(tokenizer: Tokenizer, data: list[int | None]) -> None:
    """Bytes that seldom make up a character, and ids without bytes (None) among them."""
    ids = [2 if byte is None else byte_ids(bytes([byte]))[0] for byte in data]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("data", [b"\xff", b"\x80", b"\xe2", b"\xf0\x9f\x98", MARK.encode()])
def test_long_broken_text_keeps_few_ids(tokenizer: Tokenizer, data: bytes) -> None:
    """Also where ids without bytes come in between."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    for token_id in [*byte_ids(data * 50), *[2] * 50]:
        detokenizer.push(token_id)
        assert len(detokenizer._pending_ids) <= 8


def test_a_tokenizer_whose_text_depends_on_what_stands_before(tmp_path: Path) -> None:
    """Words joined by spaces: not byte-level, and still the whole decoding."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, MARK: 2}, unk_token="a"))
    backend.save(str(tmp_path / "tokenizer.json"))
    words = Tokenizer.from_folder(tmp_path)
    assert words is not None
    assert not words.is_byte_level
    ids = [0, 1, 2, 1, 2, 2]
    assert "".join(pieces(words, ids)) == words.decode(ids) == f"a b {MARK} b {MARK} {MARK}"
