"""The comparison of experts' tiles: what is asked for, what a table then gives, and whose turn it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import expert_tiles
from benchmarks.expert_tiles import SETTLING, candidate, in_turns, name_of, put
from hemiola.kernels.experts import BF16, NVFP4
from hemiola.kernels.rows_mma import DIRECT, GROUP_TILES, DownTile, GroupTile, RowsTile, group_tile

SMALL, LARGE = GroupTile(8, 4, 3, 2), GroupTile(24, 8, 3, 1, 2)
BY_PAIR = (RowsTile(8, 2, 4, 6), DownTile(2, 4))


@pytest.mark.parametrize(
    ("text", "batch", "tile"),
    [("64:8,4,3,2", 64, SMALL), ("256:24,8,3,1,2", 256, LARGE), ("1:8,2,4,6/2,4", 1, BY_PAIR)],
)
def test_a_tile_is_asked_for_and_named(text: str, batch: int, tile: Any) -> None:
    assert candidate(text) == (batch, tile)
    assert candidate(f"7:{name_of(tile)}") == (7, tile)


@pytest.mark.parametrize("text", ["64", "64:8,8", "x:8,8,3,3", "64:8,8,3,x", "1:8,2,4,6/2", "1:8,2,4,6/2,4/1,2"])
def test_what_is_no_tile_is_refused(text: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        candidate(text)


def test_a_tile_is_for_its_batch_and_smaller_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GROUP_TILES, NVFP4, ((7.0, SMALL), (24.0, LARGE)))
    other = GroupTile(16, 8, 3, 2)
    put(NVFP4, 9.0, other)
    assert [group_tile(NVFP4, number) for number in (1.0, 9.0, 9.5, 24.0)] == [other, other, LARGE, LARGE]
    put(NVFP4, 9.0, SMALL)
    assert GROUP_TILES[NVFP4] == ((9.0, SMALL), (24.0, LARGE)), "in the place of the one before"


def test_tiles_of_few_tokens_have_their_own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DIRECT, BF16, DIRECT[BF16])
    grouped = GROUP_TILES[BF16]
    put(BF16, 0.1, BY_PAIR)
    assert set(DIRECT[BF16]) == {BY_PAIR}
    assert GROUP_TILES[BF16] == grouped


def test_each_has_its_turn_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn is timed from the end of the steps in which it settles to the end of its own."""
    taken: list[str] = []
    done, clock = [0], [0.0]  # steps; seconds, of which a turn's steps take as many milliseconds as there were turns

    def step() -> None:
        done[0] += 1
        clock[0] += 1.0 if (done[0] - 1) % (SETTLING + 5) < SETTLING else len(taken) / 1000

    driver = SimpleNamespace(engine=SimpleNamespace(step=step), synchronize=lambda: None)
    monkeypatch.setattr(expert_tiles.time, "perf_counter", lambda: clock[0])
    times = in_turns(driver, ["a", "b", "c"], taken.append, 3, 5)  # type: ignore[arg-type]
    assert "".join(taken) == "abccbaabc"
    assert done[0] == 9 * (SETTLING + 5)
    expected = {"a": [1.0, 6.0, 7.0], "b": [2.0, 5.0, 8.0], "c": [3.0, 4.0, 9.0]}
    assert all(times[name] == pytest.approx(expected[name]) for name in expected)
