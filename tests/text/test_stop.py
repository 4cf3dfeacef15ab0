"""StopMatcher against a plain search of the whole text, for every way to cut the stream (B28)."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hemiola.text.stop import StopMatcher


def run(stops: list[str], parts: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    shown = [matcher.push(part) for part in parts]
    return [*shown, matcher.finish()], matcher.hit


def search(stops: list[str], text: str) -> tuple[str, str | None]:
    """By definition: the stop that is complete first; of several that end there, the longest."""
    for end in range(len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize(
    ("stops", "parts", "shown", "hit"),
    [
        ([], ["ab", "c"], ["ab", "c", ""], None),
        (["xy"], ["abx", "yc"], ["ab", "", ""], "xy"),
        (["xy"], ["abx", "zc"], ["ab", "xzc", ""], None),
        (["xy"], ["abx"], ["ab", "x"], None),
        (["b"], ["abc"], ["a", ""], "b"),
        (["ab", "abc"], ["xa", "bc"], ["x", "", ""], "ab"),
        (["abc", "b"], ["xa", "bc"], ["x", "a", ""], "b"),
        (["abc", "bc"], ["xab", "c"], ["x", "", ""], "abc"),
        (["a"], ["abc", "d"], ["", "", ""], "a"),
        (["aab"], ["aaa", "b"], ["a", "", ""], "aab"),
        (["ababd", "abac"], ["abab", "ac", "x"], ["", "ab", "", ""], "abac"),
        (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", "", ""], "\n\n"),
    ],
)
def test_known_cases(stops: list[str], parts: list[str], shown: list[str], hit: str | None) -> None:
    assert run(stops, parts) == (shown, hit)


TEXT = st.text(alphabet="abc", max_size=20)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


@given(TEXT, STOPS, st.lists(st.integers(0, 20), max_size=6))
@settings(max_examples=1500, deadline=None)
def test_any_cut_of_any_text(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(edges)]
    shown, hit = run(stops, parts)
    expected, expected_hit = search(stops, text)
    assert ("".join(shown), hit) == (expected, expected_hit)


@given(TEXT, STOPS)
@settings(max_examples=500, deadline=None)
def test_no_more_is_withheld_than_a_stop_could_need(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(character) for character in text)
    if matcher.hit is None:
        withheld = text[len(shown) :]
        longest = max((n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        assert len(withheld) == longest


def test_a_long_stop_costs_no_more_per_character() -> None:
    """A stop and a text made to be compared again and again; a plain search would take minutes."""
    matcher = StopMatcher(["a" * 50_000 + "b"])
    start = time.perf_counter()
    for _ in range(2000):
        matcher.push("a" * 50)
    assert matcher.push("b") == ""
    assert matcher.hit is not None
    assert time.perf_counter() - start < 10
