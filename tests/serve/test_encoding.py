"""Events: what is encoded once is what would be encoded every time."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hemiola.serve.encoding import TextEvents, event

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=20)  # surrogates and NUL included


def value(kind: tuple[int, str], text: str) -> dict[str, Any]:
    index, name = kind
    return {"id": 'a "name"\\u0000', "choices": [{"index": index, "delta": {name: text, "again": text}}], "usage": None}


@given(st.lists(st.tuples(st.tuples(st.integers(0, 2), st.sampled_from(["content", "reasoning"])), ANY_TEXT)))
def test_text_events_are_the_events_of_their_values(asked: list[tuple[tuple[int, str], str]]) -> None:
    texts = TextEvents(value)
    assert [texts.event(kind, text) for kind, text in asked] == [event(value(kind, text)) for kind, text in asked]


def test_a_kind_is_made_once() -> None:
    made = []
    texts = TextEvents(lambda kind, text: made.append(kind) or {"text": text})  # type: ignore[func-returns-value]
    said = [texts.event(kind, text) for kind, text in (("a", "x"), ("b", "\0"), ("a", "y"), ("b", ""))]
    assert [json.loads(data.removeprefix(b"data: "))["text"] for data in said] == ["x", "\0", "y", ""]
    assert made == ["a", "b"]
