"""The comparison of ways in turns: what a way changes, what is left of it, and whose turn it is."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from benchmarks import turns
from benchmarks.turns import OWN, SETTLING, Ways, in_turns
from hemiola.kernels import dense_wgmma, rows_mma
from hemiola.kernels.experts import BF16, NVFP4
from hemiola.kernels.rows_mma import GroupTile
from hemiola.ops.device import moe_experts

TILES = "kernels.rows_mma: GROUP_TILES[BF16] = ((30.0, GroupTile(24, 8, 3, 1, 80, 4)),)"
TWO = "ops.device.moe_experts: TOGETHER_TOKENS[BF16] = 7 && kernels.dense_wgmma: LEAST_TOKENS = 9"


def test_a_way_is_taken_and_nothing_is_left_of_the_one_before() -> None:
    before = rows_mma.GROUP_TILES[BF16], rows_mma.GROUP_TILES[NVFP4], dense_wgmma.LEAST_TOKENS
    table, together = rows_mma.GROUP_TILES, moe_experts.TOGETHER_TOKENS[BF16]
    ways = Ways([TILES, TWO])
    assert list(ways.assignments) == [OWN, TILES, TWO]
    ways.take(TILES)
    assert rows_mma.group_tile(BF16, 12.0) == GroupTile(24, 8, 3, 1, 80, 4)
    assert rows_mma.GROUP_TILES is table, "as whoever else holds it sees it"
    ways.take(TWO)
    assert (moe_experts.TOGETHER_TOKENS[BF16], dense_wgmma.LEAST_TOKENS) == (7, 9)
    assert table[BF16] == before[0]
    ways.take(OWN)
    assert (table[BF16], table[NVFP4], dense_wgmma.LEAST_TOKENS) == before
    assert moe_experts.TOGETHER_TOKENS[BF16] == together


@pytest.mark.parametrize("text", ["kernels.rows_mma", "LEAST_TOKENS = 9", "kernels.dense_wgmma: LEAST_TOKENS"])
def test_what_assigns_nothing_in_a_module_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"no assignment in a module: '{text}'; expected"):
        Ways([text])


def test_each_has_its_turn_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn is timed from the end of the steps in which it settles to the end of its own."""
    taken: list[str] = []
    done, clock = [0], [0.0]  # steps; seconds, of which a turn's steps take as many milliseconds as there were turns

    def step() -> None:
        done[0] += 1
        clock[0] += 1.0 if (done[0] - 1) % (SETTLING + 5) < SETTLING else len(taken) / 1000

    driver = SimpleNamespace(engine=SimpleNamespace(step=step), synchronize=lambda: None)
    monkeypatch.setattr(turns.time, "perf_counter", lambda: clock[0])
    times = in_turns(driver, ["a", "b", "c"], taken.append, 3, 5)  # type: ignore[arg-type]
    assert "".join(taken) == "abccbaabc"
    assert done[0] == 9 * (SETTLING + 5)
    expected = {"a": [1.0, 6.0, 7.0], "b": [2.0, 5.0, 8.0], "c": [3.0, 4.0, 9.0]}
    assert all(times[name] == pytest.approx(expected[name]) for name in expected)


def test_a_small_model_takes_its_turns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    way = "kernels.dense_wgmma: LEAST_TOKENS = 9"
    arguments = ["lightning-30b-tiny", "2", "3x20", "--rounds", "2", "--steps", "2", "--way", way]
    monkeypatch.setattr("sys.argv", ["turns", *arguments])
    turns.main()
    document = json.loads(capsys.readouterr().out)
    assert [row["cell"] for row in document["cells"]] == ["decode 2 x 128", "decode 3 x 20"]
    assert all([len(times) for times in row["ms_per_step"].values()] == [2, 2] for row in document["cells"])
    assert all(list(row["ms_per_step"]) == [OWN, way] for row in document["cells"])
    assert dense_wgmma.LEAST_TOKENS == 3
