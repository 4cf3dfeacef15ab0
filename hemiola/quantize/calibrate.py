"""Largest magnitudes of activations, taken from real text through the engine's own taps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from hemiola.config.calibration import CalibrationConfig
from hemiola.config.engine import EngineConfig
from hemiola.config.sampling import SamplingParams
from hemiola.errors import RequestError
from hemiola.loading import load
from hemiola.quantize.progress import Progress
from hemiola.text.tokenizer import Tokenizer


class AmaxTap:
    """A tap that keeps the largest magnitude of each named activation, 0 where it was never met.

    NaN and infinity stay visible: once met, the magnitude is no longer finite.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._amax = {name: torch.zeros(()) for name in names}

    def __call__(self, name: str, tensor: torch.Tensor, /) -> None:
        if name in self._amax:
            self._amax[name] = torch.maximum(self._amax[name], tensor.abs().max().float().cpu())

    def values(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._amax.items()}


def read_windows(
    file: Path, tokenizer: Tokenizer | None, config: CalibrationConfig, max_window: int
) -> list[list[int]]:
    """The token ids to run: windows of at most `config.window` (and `max_window`) tokens, `config.num_tokens` in all.

    file: UTF-8 text, which the tokenizer encodes as one piece, or a .json file with a list of lists of token ids. Where
    there is more than asked for, windows are taken at even distances.

    Raises: RequestError when the file cannot be used: unreadable, empty, ids that are none, text without a tokenizer.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError("calibration text cannot be read", found=error, where=file) from error
    if file.suffix == ".json":
        sequences = _parse_ids(text, file)
    elif tokenizer is None:
        raise RequestError(
            "the source has no tokenizer, so calibration text cannot be encoded",
            expected="a .json file with a list of lists of token ids",
            where=file,
        )
    else:
        sequences = [tokenizer.encode(text)]
    window = min(config.window, max_window)
    windows = [ids[low : low + window] for ids in sequences for low in range(0, len(ids), window)]
    if not windows:
        raise RequestError("the calibration file holds no tokens", where=file)
    count = min(len(windows), -(-config.num_tokens // window))
    return [windows[index * len(windows) // count] for index in range(count)]


def _parse_ids(text: str, file: Path) -> list[list[int]]:
    expected = "a list of lists of token ids"
    try:
        sequences = json.loads(text)
    except ValueError as error:
        raise RequestError("not valid JSON", found=error, expected=expected, where=file) from error
    if not isinstance(sequences, list) or not all(isinstance(ids, list) for ids in sequences):
        raise RequestError("calibration ids of another form", expected=expected, where=file)
    for index, ids in enumerate(sequences):
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise RequestError("not a token id", found=repr(token), expected=expected, where=f"{file}: [{index}]")
    return sequences


def collect_amax(
    folder: Path, windows: Sequence[Sequence[int]], names: Iterable[str], progress: Progress
) -> dict[str, float]:
    """Run the windows through an engine in bf16 mode, each from an empty state; the amax of each tap in `names`.

    Raises: RequestError for an id outside the vocabulary, before anything runs; CapacityError.
    """
    tap = AmaxTap(names)
    # The token that each window's end is followed by is sampled and forgotten.
    length = max(len(window) for window in windows) + 1
    engine = load(folder, EngineConfig(dtype="bf16", kv_cache_dtype="model", max_model_len=length), tap=tap).engine
    params = SamplingParams(max_tokens=1)
    requests = [engine.add_request(f"window {index}", window, params) for index, window in enumerate(windows)]
    total = sum(len(window) for window in windows)
    progress("calibrate", 0, total)
    while engine.has_unfinished:
        engine.step()
        progress("calibrate", sum(request.num_computed for request in requests), total)
    return tap.values()
