"""Sampling on the GPU: the reference's ids with the same logits, without waiting for the device."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from hemiola.kernels.sample import argmax, top_logprobs
from hemiola.ops.device.sample import sample
from hemiola.ops.sample import SampleBatch, SampleRow
from hemiola.ops.sample import sample as reference

VOCAB = 131072
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6, "top_p": 0.95},
    {"temperature": 1.5, "top_k": 50},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.02},
    {"top_k": 5000, "temperature": 2.0},
    {"top_p": 0.999, "temperature": 4.0},
    {"min_p": 0.05},
    {"temperature": 0.0, "penalties": True},
    {"temperature": 0.8, "penalties": True, "bias": True},
    {"top_p": 0.9, "penalties": True, "bias": True},
]


def row(kind: dict[str, Any], seed: int, position: int, device: str) -> SampleRow:
    rng = random.Random(seed)
    penalised = kind.get("penalties", False)
    ids = rng.sample(range(VOCAB), 400)
    counts = [float(rng.randrange(4)) for _ in ids]
    pairs = torch.tensor(ids, device=device), torch.tensor(counts, device=device)
    biased = torch.tensor(ids[:30], device=device), torch.tensor([5.0, -math.inf, 0.3] * 10, device=device)
    return SampleRow(
        seed=seed,
        position=position,
        temperature=kind.get("temperature", 1.0),
        top_k=kind.get("top_k", 0),
        top_p=kind.get("top_p", 1.0),
        min_p=kind.get("min_p", 0.0),
        repetition_penalty=1.3 if penalised else 1.0,
        presence_penalty=0.4 if penalised else 0.0,
        frequency_penalty=-0.2 if penalised else 0.0,
        bias=biased if kind.get("bias") else None,
        seen=pairs if penalised else None,
    )


def batch_of(rows: int, position: int, device: str) -> SampleBatch:
    """Every eighth row is greedy."""
    return SampleBatch(
        tuple((i, row(KINDS[(i + position) % len(KINDS)], i, position, device)) for i in range(rows) if i % 8)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_ids_as_the_reference(dtype: torch.dtype) -> None:
    """An id may differ only where float64 sums of another order decide; with these seeds none does."""
    g = torch.Generator("cuda").manual_seed(1)
    differing = drawn = 0
    for position in range(3):
        logits = (torch.randn(48, VOCAB, generator=g, device="cuda") * 3).to(dtype)
        ids = sample(logits, batch_of(48, position, "cuda")).cpu()
        host = logits.cpu().float()
        expected = reference(host, batch_of(48, position, "cpu"))
        differing += int((ids != expected).sum())
        drawn += int((expected != host.argmax(-1)).sum())
    print(f"{differing} of {3 * 48} ids differ; {drawn} are not the best id")
    assert differing == 0
    assert drawn > 40


def test_a_row_alone_equals_the_row_in_a_batch() -> None:
    logits = torch.randn(40, VOCAB, device="cuda") * 3
    batch = batch_of(40, 5, "cuda")
    together = sample(logits, batch)
    for i, row in batch.rows[::4]:
        assert sample(logits[i : i + 1], SampleBatch(((0, row),))) == together[i]


def test_the_host_does_not_wait() -> None:
    logits = torch.randn(24, VOCAB, device="cuda")
    batch = batch_of(24, 0, "cuda")
    sample(logits, batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sample(logits, batch)
        argmax(logits)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def awkward(rows: int, vocab: int, dtype: torch.dtype) -> Tensor:
    logits = (torch.randn(rows, vocab, device="cuda") * 3).round().to(dtype)
    logits[-1] = -math.inf
    if rows > 5:
        logits[0] = math.nan
        logits[1, vocab // 2 :] = math.nan
        logits[2, vocab // 3] = math.inf
        logits[3] = -1.0
        logits[3, vocab // 4 :: 2] = -0.0
        logits[3, vocab // 4 + 1 :: 2] = 0.0
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [VOCAB, 501])
@pytest.mark.parametrize("rows", [1, 3, 9, 64, 256])
def test_argmax_is_the_lowest_of_the_best_and_can_be_captured(rows: int, vocab: int, dtype: torch.dtype) -> None:
    logits, out = torch.zeros(rows, vocab, dtype=dtype, device="cuda"), torch.empty(rows, dtype=torch.int64).cuda()
    argmax(logits, out)
    assert out.eq(0).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        argmax(logits, out)
    for _ in range(2):
        logits.copy_(awkward(rows, vocab, dtype))
        out.fill_(-1)
        graph.replay()
        assert torch.equal(out.cpu(), logits.cpu().float().argmax(-1))


def test_top_logprobs() -> None:
    logits = awkward(64, VOCAB, torch.float32)[4:]
    logprobs, ids = top_logprobs(logits, 20)
    assert torch.equal(ids.cpu(), logits.cpu().sort(dim=-1, descending=True, stable=True).indices[:, :20])
    assert torch.allclose(logprobs.double(), logits.double().log_softmax(-1).gather(1, ids), atol=1e-5, equal_nan=True)
