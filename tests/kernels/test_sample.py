"""The best ids of a row, and the device's sampling against the reference with the same logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hemiola.kernels.sample import argmax, best_ids, top_logprobs
from hemiola.ops.device.sample import sample
from hemiola.ops.sample import SampleBatch, SampleRow
from hemiola.ops.sample import sample as reference
from tests.support.numerics import generator, randn

VOCAB = 1003
PLAIN: dict[str, Any] = {
    "seed": 0,
    "position": 0,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "bias": None,
    "seen": None,
}
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"top_k": 4},
    {"top_k": 1},
    {"top_k": 10**9, "temperature": 1.7},
    {"top_p": 0.6},
    {"top_p": 1e-300},
    {"min_p": 0.3},
    {"top_k": 50, "top_p": 0.7, "temperature": 1.5},
    {"top_k": 6, "top_p": 0.8, "min_p": 0.35, "temperature": 2.0},
    {"temperature": 5e-324},
    {"temperature": 1e308, "top_k": 7},
    {"temperature": 0.0, "bias": {8: 50.0}},
    {"temperature": 0.0, "seen": {2: 1, 7: 0}, "frequency_penalty": 0.4},
    {"bias": {8: 5.0, 2: -1.0, 4: -math.inf}, "top_k": 5},
    {"seen": {2: 0, 1: 0, 7: 2}, "repetition_penalty": 1.8, "temperature": 0.7},
    {
        "bias": {8: 4.0, 3: -math.inf},
        "seen": {2: 3, 8: 1, 1: 0},
        "repetition_penalty": 1.3,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.2,
        "temperature": 1.4,
        "min_p": 0.05,
        "top_k": 70,
        "top_p": 0.9,
    },
]


def row(kind: dict[str, Any], seed: int, position: int) -> SampleRow:
    fields = PLAIN | kind | {"seed": seed, "position": position}
    for name in ("bias", "seen"):
        if fields[name] is not None:
            values = fields[name]
            fields[name] = torch.tensor(list(values)), torch.tensor(list(values.values()), dtype=torch.float32)
    return SampleRow(**fields)


def awkward(g: torch.Generator, rows: int, vocab: int, dtype: torch.dtype) -> Tensor:
    """Few different values, so that ties are everywhere, with rows of NaN, infinities and zeros of both signs."""
    logits = randn(g, rows, vocab).mul(2).round().to(dtype)
    logits[0] = -math.inf
    logits[1] = math.nan
    logits[2, vocab // 2 :] = math.nan
    logits[3, vocab // 3] = math.inf
    logits[4] = -1.0
    logits[4, vocab // 4 :: 2] = -0.0
    logits[4, vocab // 4 + 1 :: 2] = 0.0
    return logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [6, 9])
@pytest.mark.parametrize("vocab", [5, 1024, 5003])
def test_argmax_is_the_lowest_of_the_best(rows: int, vocab: int, dtype: torch.dtype) -> None:
    logits = awkward(generator(vocab), rows, vocab, dtype)
    out = torch.full((rows,), -1)
    assert argmax(logits, out) is out
    assert torch.equal(out, logits.float().argmax(dim=-1))
    assert out[4] == vocab // 4, "a negative zero is a zero"


def test_argmax_of_a_view_and_of_no_rows() -> None:
    logits = randn(generator(1), 3, 70)[:, 5:66]
    assert torch.equal(argmax(logits), logits.argmax(dim=-1))
    assert argmax(logits[:0]).shape == (0,)


@pytest.mark.parametrize("k", [0, 1, 7, VOCAB])
def test_best_ids_and_their_logprobs(k: int) -> None:
    logits = awkward(generator(2), 9, VOCAB, torch.float32)
    expected = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(best_ids(logits, k), expected)
    logprobs, ids = top_logprobs(logits[4:], k)
    assert torch.equal(ids, expected[4:])
    assert torch.equal(logprobs, logits[4:].log_softmax(-1).gather(1, ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_ids_as_the_reference(dtype: torch.dtype) -> None:
    """Rows of all kinds in one batch, with greedy ones between them; over many draws."""
    g = generator(3)
    different = set()
    for position in range(12):
        logits = (randn(g, 40, VOCAB) * 2).to(dtype)
        kinds = [(i, KINDS[(i + position) % len(KINDS)]) for i in range(0, 40) if i % 7]
        batch = SampleBatch(tuple((i, row(kind, 100 + i, position)) for i, kind in kinds))
        expected = reference(logits.float(), batch)
        assert torch.equal(sample(logits, batch), expected)
        different |= set((expected != logits.float().argmax(-1)).nonzero().flatten().tolist())
    assert len(different) > 25, "the draws are not the best ids"


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_without_a_finite_best(kind: dict[str, Any]) -> None:
    logits = awkward(generator(4), 5, VOCAB, torch.float32)
    batch = SampleBatch(tuple((i, row(kind, i, 0)) for i in range(5)))
    assert torch.equal(sample(logits, batch), reference(logits, batch))


def test_logits_are_left_alone() -> None:
    logits = randn(generator(5), len(KINDS), VOCAB)
    before = logits.clone()
    sample(logits, SampleBatch(tuple((i, row(kind, i, 0)) for i, kind in enumerate(KINDS))))
    assert torch.equal(logits, before)


def test_a_barred_id_is_never_drawn() -> None:
    logits = torch.zeros(16, 64)
    barred = dict.fromkeys(range(0, 64, 2), -math.inf)
    for position in range(4):
        rows = tuple((i, row({"bias": barred, "top_p": (1.0, 0.9)[i % 2]}, i, position)) for i in range(16))
        assert sample(logits, SampleBatch(rows)).remainder(2).eq(1).all()
