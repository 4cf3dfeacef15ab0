"""Public bug reports about state slots and KV blocks that change hands, through LLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hemiola import LLM, SamplingParams
from tests.support.witness import Seen, Witness, poison

Folder = Callable[..., Path]
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def one_slot(folder: Path, **settings: Any) -> tuple[LLM, Witness]:
    llm = LLM(folder, max_num_seqs=1, max_model_len=64, **settings)
    return llm, Witness(llm.loaded.engine)


def bits(seen: Seen) -> list[Tensor]:
    return [torch.stack(seen.logits), *seen.conv.values(), *seen.ssm.values()]


@pytest.mark.parametrize("ends", ["finished", "aborted in prefill", "aborted in decode"])
@pytest.mark.parametrize(
    "settings", [{"dtype": "float32"}, {"dtype": "bf16"}, {"dtype": "bf16", "kv_cache_dtype": "fp8"}], ids=repr
)
def test_b18_reused_slot_never_shows_the_old_tenant(tiny_folder: Folder, ends: str, settings: dict[str, Any]) -> None:
    """One state slot: B after A, bit for bit as B on a fresh engine, and with the pool full of NaN before."""
    folder = tiny_folder("MEM*-", conv_gain=30.0)
    prompt_a, prompt_b = ids(30, 1), ids(21, 2)
    llm, witness = one_slot(folder, **settings)
    fresh_ids = llm.generate([prompt_b], PARAMS)[0].outputs[0].token_ids
    fresh = witness.seen["request-0.0"]

    llm, witness = one_slot(folder, max_num_batched_tokens=16, **settings)
    poison(llm.loaded.engine)
    if ends == "finished":
        llm.generate([prompt_a], PARAMS)
    else:
        answer = llm.front.add(prompt_a, PARAMS)
        for _ in range(1 if ends == "aborted in prefill" else 5):
            llm.front.step()
        assert bool(answer.choices[0].request.output_ids) == (ends == "aborted in decode")
        llm.front.abort(answer)
    assert not any(t.isnan().any() for t in bits(witness.seen["request-0.0"]))
    llm.loaded.engine.scheduler.max_num_batched_tokens = 2048
    assert llm.generate([prompt_b], PARAMS)[0].outputs[0].token_ids == fresh_ids
    reused = witness.seen["request-1.0"]
    assert all(torch.equal(got, want) for got, want in zip(bits(reused), bits(fresh), strict=True))


def test_b18_the_check_sees_a_state_that_is_left(tiny_folder: Folder) -> None:
    """An engine that takes a first chunk for a later one reads the old tenant's state, and its answer changes."""
    folder = tiny_folder("MEM*-", conv_gain=30.0)
    llm, witness = one_slot(folder, dtype="float32", prefix_caching=False)
    llm.generate([ids(30, 1)], PARAMS)
    forward = witness.model.forward

    def stale(batch: Any, caches: Any, tap: Any = None) -> Tensor:
        batch.num_computed.clamp_(min=1)
        return forward(batch, caches, tap)

    llm.generate([ids(21, 2)], PARAMS)
    witness.model.forward = stale  # type: ignore[method-assign]
    llm.generate([ids(21, 2)], PARAMS)
    right, wrong = witness.seen["request-1.0"], witness.seen["request-2.0"]
    assert (torch.stack(right.logits) - torch.stack(wrong.logits)).abs().max() > 0.1


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_b22_identical_requests_have_one_answer(tiny_folder: Folder, count: int) -> None:
    """At once, and as the choices of one request; each slot keeps its own state."""
    llm = LLM(tiny_folder("MEM*-", conv_gain=30.0), dtype="float32", max_num_batched_tokens=24)
    poison(llm.loaded.engine)
    prompt = ids(20, 3)
    solo = llm.generate([prompt], PARAMS)[0].outputs[0].token_ids
    outputs = llm.generate([prompt] * count, PARAMS)
    choices = llm.generate([prompt], SamplingParams(n=count, max_tokens=10, ignore_eos=True))[0].outputs
    assert [choice.index for choice in choices] == list(range(count))
    for choice in [*choices, *(output.outputs[0] for output in outputs)]:
        assert choice.token_ids == solo
