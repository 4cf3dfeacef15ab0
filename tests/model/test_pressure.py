"""Two hundred requests that share prefixes, are aborted and preempted, in caches full of NaN: each says what it says
alone on a fresh engine without any reuse. float32; a difference is allowed where the solo run had a near tie."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hemiola import SamplingParams
from hemiola.config.engine import EngineConfig
from hemiola.engine.engine import Engine
from hemiola.engine.request import FinishReason, Request
from hemiola.loading import load
from tests.support.witness import poison

Folder = Callable[..., Path]
NEAR_TIE = 1e-3
LONGEST = 30
SPEEDS = {"swap": 1.0, "recompute": 1e12}  # tokens a second, against which a swap is cheap or dear


def engine_like(engine: Engine, kv_dtype: torch.dtype, **settings: Any) -> Engine:
    """A fresh engine for a loaded model, on poisoned caches."""
    config = EngineConfig(dtype="float32", max_model_len=160, **settings)
    fresh = Engine(engine.model, config, eos_token_ids=(), kv_dtype=kv_dtype, available_bytes=1 << 40)
    poison(fresh)
    return fresh


def prompts_of(draw: random.Random, count: int) -> list[list[int]]:
    texts = [[draw.randrange(3, 512) for _ in range(90)] for _ in range(4)]
    made: list[list[int]] = []
    for _ in range(count):
        kind = draw.random()
        if kind < 0.15 and made:
            made.append(list(draw.choice(made)))  # the same again
        elif kind < 0.8:
            tail = [draw.randrange(3, 512) for _ in range(draw.randrange(0, 20))]
            made.append(draw.choice(texts)[: draw.randrange(1, 90)] + tail)
        else:
            made.append([draw.randrange(3, 512) for _ in range(draw.randrange(1, 70))])
    return made


SOLO: dict[tuple[torch.dtype, tuple[int, ...]], Request] = {}


def alone(engine: Engine, kv_dtype: torch.dtype, prompt: list[int]) -> Request:
    """What a fresh engine says to a prompt, to the length that any request asks for; once per prompt."""
    key = (kv_dtype, tuple(prompt))
    if key not in SOLO:
        solo = engine_like(engine, kv_dtype, prefix_caching=False, max_num_seqs=1, cache_bytes=1 << 18)
        SOLO[key] = solo.add_request("solo", prompt, SamplingParams(max_tokens=LONGEST, logprobs=2))
        while solo.has_unfinished:
            solo.step()
    return SOLO[key]


def assert_same(got: Request, solo: Request) -> None:
    """The tokens that got has, aborted or not, are the solo run's up to a near tie."""
    for position, (a, b) in enumerate(zip(got.output_ids, solo.output_ids, strict=False)):
        if a != b:
            (_, best), (_, second) = solo.logprobs[position][:2]
            assert best - second < NEAR_TIE, f"{got.request_id} says {a}, not {b}, at {position}"
            return
    for entry, wanted in zip(got.logprobs, solo.logprobs, strict=False):
        assert entry[0][1] == pytest.approx(wanted[0][1], abs=5e-3), "NaN, or far from it"


@pytest.mark.parametrize("mode", SPEEDS)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn], ids=["float32", "fp8"])
def test_two_hundred_requests_under_pressure(tiny_folder: Folder, kv_dtype: torch.dtype, mode: str) -> None:
    folder = tiny_folder(
        "MEM*E-", overrides={"chunk_size": 32, "num_key_value_heads": 4, "head_dim": 32}, conv_gain=30.0
    )
    base = load(folder, EngineConfig(dtype="float32")).engine
    slot, block = base.plan.slot_bytes, base.plan.block_bytes * kv_dtype.itemsize // 4
    engine = engine_like(
        base, kv_dtype, cache_bytes=6 * slot + max(16 * block, 6 * slot), max_num_seqs=6, max_num_batched_tokens=48,
        snapshot_bytes=12 * slot, host_snapshot_bytes=6 * slot, prefill_tokens_per_s=SPEEDS[mode], host_bytes_per_s=1e9,
    )  # fmt: skip
    draw = random.Random(3)
    requests: list[Request] = []
    for number, prompt in enumerate(prompts_of(draw, 200)):
        params = SamplingParams(max_tokens=draw.randrange(1, LONGEST + 1), logprobs=2)
        requests.append(engine.add_request(str(number), prompt, params, priority=draw.randrange(2)))
        for _ in range(draw.randrange(0, 6)):
            engine.step()
        if draw.random() < 0.1:
            engine.finish(draw.choice(requests).request_id, FinishReason.ABORT)
        engine.check_integrity()
    while engine.has_unfinished:
        engine.step()
        engine.check_integrity()
    stats = engine.stats()
    kinds = {"swap": stats.preemptions.swapped, "recompute": stats.preemptions.recomputed}
    assert kinds[mode] >= 10, kinds
    assert stats.prefix.prompts_hit >= 20
    assert sum(r.finish_reason is FinishReason.ABORT for r in requests) >= 5
    for request in requests:
        if request.finish_reason is not FinishReason.ABORT:
            assert len(request.output_ids) == request.params.max_tokens
        if request.output_ids:
            assert_same(request, alone(base, kv_dtype, request.prompt_ids))
