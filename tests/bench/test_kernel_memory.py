"""The benchmark of memory alone: its kernels compile without spills, and its check tells a word that was left out."""

from __future__ import annotations

from functools import reduce
from operator import xor

import pytest
import torch

from benchmarks import kernel_memory
from benchmarks.kernel_memory import (
    READINGS,
    UPDATINGS,
    Reading,
    Updating,
    exclusive_or,
    read_function,
    update_function,
)
from hemiola.kernels import cuda
from tests.support.offline import compile_cuda

needs_nvrtc = pytest.mark.skipif(cuda.missing() is not None, reason=str(cuda.missing()))


@needs_nvrtc
@pytest.mark.parametrize("way", [*READINGS[::4], *UPDATINGS[::2]], ids=str)
def test_its_kernels_compile_and_do_not_spill(way: Reading | Updating) -> None:
    function = read_function(way) if isinstance(way, Reading) else update_function(way)
    compiled = compile_cuda(function.module.source, function.name, 90, function.module.options)
    assert not compiled.problems()
    assert compiled.num_warps == way.warps
    assert compiled.registers * 32 * way.warps * way.resident <= 65_536, "so many blocks find room"


@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_all_words_count(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_memory.read, "read", lambda words: words.clone())
    words = torch.randint(-(1 << 31), 1 << 31, (count,), dtype=torch.int64).to(torch.int32)
    assert exclusive_or(words) == reduce(xor, words.tolist())
    for place in range(count):
        other = words.clone()
        other[place] ^= 1
        assert exclusive_or(other) != exclusive_or(words)
