"""Calibration input: which ids are run; and the tap that keeps the largest magnitude."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from hemiola.config.calibration import CalibrationConfig
from hemiola.errors import ConfigError, RequestError
from hemiola.quantize.calibrate import AmaxTap, read_windows
from hemiola.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import build_tokenizer

ALL = CalibrationConfig(num_tokens=1000, window=4)


def ids_file(folder: Path, content: object) -> Path:
    file = folder / "ids.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_text_is_encoded_as_one_piece_and_cut(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(build_tokenizer(tmp_path))
    assert tokenizer is not None
    (tmp_path / "text.txt").write_text("bada denum fox")
    windows = read_windows(tmp_path / "text.txt", tokenizer, ALL, 100)
    assert [token for window in windows for token in window] == tokenizer.encode("bada denum fox")
    assert [len(window) for window in windows[:-1]] == [4] * (len(windows) - 1)


def test_each_list_of_ids_is_cut_for_itself(tmp_path: Path) -> None:
    file = ids_file(tmp_path, [[1, 2, 3, 4, 5], [], [6]])
    assert read_windows(file, None, ALL, 100) == [[1, 2, 3, 4], [5], [6]]
    assert read_windows(file, None, ALL, 3) == [[1, 2, 3], [4, 5], [6]], "the model's length bounds the window"


def test_windows_are_spread_over_all_of_a_long_text(tmp_path: Path) -> None:
    file = ids_file(tmp_path, [list(range(400))])
    windows = read_windows(file, None, CalibrationConfig(num_tokens=14, window=4), 100)
    assert windows == [[first, first + 1, first + 2, first + 3] for first in (0, 100, 200, 300)]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "not valid JSON"),
        ({"a": 1}, "list of lists"),
        ([1, 2], "list of lists"),
        ([[1], [2, "3"]], r"ids\.json: \[1\]: not a token id; found '3'"),
        ([[1.5]], "not a token id"),
        ([[True]], "not a token id"),
        ([], "holds no tokens"),
        ([[]], "holds no tokens"),
    ],
)
def test_ids_that_cannot_be_used(tmp_path: Path, content: object, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        read_windows(ids_file(tmp_path, content), None, ALL, 100)


def test_text_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text")
    with pytest.raises(RequestError, match=r"no tokenizer.*expected a \.json file with a list of lists of token ids"):
        read_windows(tmp_path / "text.txt", None, ALL, 100)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for name in ("latin.txt", "absent.txt"):
        with pytest.raises(RequestError, match=f"{name}: calibration text cannot be read"):
            read_windows(tmp_path / name, None, ALL, 100)


@pytest.mark.parametrize("setting", [{"num_tokens": 0}, {"window": -1}, {"window": 2.0}, {"num_tokens": True}])
def test_settings_are_counts(setting: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(setting))}: not a positive count"):
        CalibrationConfig(**setting)  # type: ignore[arg-type]


def test_the_tap_keeps_the_largest_magnitude_of_what_it_was_asked_for() -> None:
    tap = AmaxTap(["a", "b", "c", "d"])
    tap("a", torch.tensor([[1.0, -3.5]], dtype=torch.bfloat16))
    tap("a", torch.tensor([[2.0, 0.0]], dtype=torch.bfloat16))
    tap("other", torch.tensor([9.0]))
    tap("c", torch.tensor([float("nan"), 1.0]))
    tap("c", torch.tensor([1.0]))
    tap("d", torch.tensor([-float("inf")]))
    values = tap.values()
    assert math.isnan(values.pop("c")), "NaN is not forgotten"
    assert values == {"a": 3.5, "b": 0.0, "d": math.inf}
