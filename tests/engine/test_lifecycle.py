"""Lifecycle: errors that belong to one request, steps that fail, health, priorities, aborts while swapped out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hemiola import LLM, SamplingParams
from hemiola.engine.request import FinishReason, Request, RequestStatus
from hemiola.engine.runner import Ids
from hemiola.errors import RequestError
from tests.support.witness import poison

Folder = Callable[..., Path]
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def folder(tiny_folder: Folder) -> Path:
    return tiny_folder("MEM*-", conv_gain=30.0)


def engine_of(folder: Path, **settings: Any) -> LLM:
    llm = LLM(folder, **({"dtype": "float32", "max_model_len": 256} | settings))
    poison(llm.loaded.engine)
    return llm


def finish(llm: LLM) -> None:
    while llm.front.has_unfinished:
        llm.front.step()
        llm.loaded.engine.check_integrity()
    scheduler = llm.loaded.engine.scheduler
    assert (scheduler.blocks.num_free, scheduler.slots.num_free) == (scheduler.blocks.size, scheduler.slots.size)


def tight(folder: Path, **settings: Any) -> LLM:
    """Four slots, and blocks for hardly two of the requests below."""
    plan = LLM(folder).loaded.engine.plan
    llm = engine_of(
        folder, max_num_seqs=4, cache_bytes=4 * plan.slot_bytes + max(11 * plan.block_bytes, 4 * plan.slot_bytes),
        **settings,
    )  # fmt: skip
    assert llm.loaded.engine.plan.num_slots == 4
    assert llm.loaded.engine.plan.num_blocks < 4 * 5
    return llm


@pytest.mark.parametrize("part", ["sampling", "logprobs", "prompt_logprobs"])
def test_what_fails_for_one_request_ends_that_one(folder: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """A fault in the middle of a batch of three: the others' answers are what they are without it."""
    prompts = [ids(20, seed) for seed in range(3)]
    expected = [output.outputs[0].token_ids for output in engine_of(folder).generate(prompts, PARAMS)]
    llm = engine_of(folder)
    sampler = llm.loaded.engine.sampler
    original_sample, original_logprobs = sampler.sample, sampler.top_logprobs

    def sample(logits: torch.Tensor, requests: Sequence[Request], best: torch.Tensor | None = None) -> torch.Tensor:
        if part == "sampling" and any(r.request_id == "request-1.0" and len(r.output_ids) == 2 for r in requests):
            raise ValueError("a parameter nobody foresaw")
        return original_sample(logits, requests, best)

    def top_logprobs(logits: torch.Tensor, k: int, chosen: Sequence[int]) -> list[list[tuple[int, float]]]:
        if k == 7:
            raise RuntimeError("k is out of range")
        return original_logprobs(logits, k, chosen)

    monkeypatch.setattr(sampler, "sample", sample)
    monkeypatch.setattr(sampler, "top_logprobs", top_logprobs)
    bad = SamplingParams(max_tokens=6, ignore_eos=True, **({} if part == "sampling" else {part: 7}))
    outputs = llm.generate(prompts, [PARAMS, bad, PARAMS])
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert [outputs[i].outputs[0].token_ids for i in (0, 2)] == [expected[0], expected[2]]
    error = outputs[1].outputs[0].error
    assert error is not None
    assert error.startswith("request-1.0: ")
    assert ("nobody foresaw" in error) == (part == "sampling")
    assert outputs[0].outputs[0].error is None
    assert outputs[1].outputs[0].token_ids == (expected[1][:2] if part == "sampling" else [])
    finish(llm)


def test_an_error_is_typed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine_of(folder)
    monkeypatch.setattr(llm.loaded.engine.sampler, "sample", lambda *_: 1 / 0)
    answer = llm.front.add(ids(5, 0), PARAMS)
    finish(llm)
    request = answer.choices[0].request
    assert request.finish_reason is FinishReason.ERROR
    assert isinstance(request.error, RequestError)
    assert str(request.error) == "request-0.0: ZeroDivisionError: division by zero"


def test_a_request_whose_id_cannot_be_settled_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [ids(20, seed) for seed in range(3)]
    expected = [output.outputs[0].token_ids for output in engine_of(folder).generate(prompts, PARAMS)]
    llm = engine_of(folder)
    sampler = llm.loaded.engine.sampler
    original = sampler.settle

    def settle(request: Request, sampled_id: int) -> int:
        if request.request_id == "request-1.0" and len(request.output_ids) == 2:
            raise RuntimeError("an id nobody foresaw")
        return original(request, sampled_id)

    monkeypatch.setattr(sampler, "settle", settle)
    outputs = [output.outputs[0] for output in llm.generate(prompts, PARAMS)]
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert [output.token_ids for output in outputs] == [expected[0], expected[1][:2], expected[2]]
    finish(llm)


def test_ids_that_do_not_arrive_are_drawn_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [ids(20, seed) for seed in range(3)]
    expected = [output.outputs[0].token_ids for output in engine_of(folder).generate(prompts, PARAMS)]
    llm = engine_of(folder)
    answers = [llm.front.add(prompt, PARAMS) for prompt in prompts]
    for _ in range(3):
        llm.front.step()
    with monkeypatch.context() as patch:
        patch.setattr(Ids, "tolist", lambda _: (_ for _ in ()).throw(RuntimeError("device lost")))
        with pytest.raises(RuntimeError, match="device lost"):
            llm.front.step()
    llm.loaded.engine.check_integrity()
    finish(llm)
    assert [answer.choices[0].request.output_ids for answer in answers] == expected


@pytest.mark.parametrize("at", [0, 2, 5])
def test_a_step_that_fails_spoils_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The model raises after it has moved half of its states; the error comes out, and the next steps are right."""
    prompts = [ids(40, seed) for seed in range(3)]
    expected = [output.outputs[0].token_ids for output in engine_of(folder).generate(prompts, PARAMS)]
    llm = engine_of(folder, max_num_batched_tokens=32)
    engine = llm.loaded.engine
    answers = [llm.front.add(prompt, PARAMS) for prompt in prompts]
    for _ in range(at):
        llm.front.step()
    mixer = engine.model.layers[-1].mixer
    with monkeypatch.context() as patch:
        patch.setattr(type(mixer), "__call__", lambda *_: (_ for _ in ()).throw(RuntimeError("device lost")))
        with pytest.raises(RuntimeError, match="device lost"):
            llm.front.step()
    engine.check_integrity()
    assert engine.stats().snapshots_held == engine.stats().blocks_published == 0
    finish(llm)
    assert [answer.choices[0].request.output_ids for answer in answers] == expected


def test_health(folder: Path) -> None:
    llm = engine_of(folder, stall_seconds=5.0)
    engine = llm.loaded.engine
    assert engine.healthy(time.monotonic() + 1000), "no work, no complaint"
    llm.front.add(ids(5, 0), PARAMS)
    now = time.monotonic()
    assert engine.healthy()
    assert engine.healthy(now + 4.0)
    assert not engine.healthy(now + 5.1)
    llm.front.step()
    assert engine.healthy(time.monotonic() + 4.9)
    assert not engine.healthy(time.monotonic() + 5.1)
    finish(llm)
    assert engine.healthy(time.monotonic() + 1000)


SPEEDS = {"swap": 1.0, "recompute": 1e12}


@pytest.mark.parametrize("kind", SPEEDS)
def test_the_first_in_order_is_never_preempted(folder: Path, kind: str) -> None:
    """Long outputs that outgrow the pool; all finish, with the tokens they have alone, and the first in one go."""
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    prompts = [ids(20, seed) for seed in range(4)]
    expected = [engine_of(folder).generate([p], params)[0].outputs[0].token_ids for p in prompts]
    llm = tight(folder, prefill_tokens_per_s=SPEEDS[kind])
    answers = [llm.front.add(prompt, params, priority=1 if i == 0 else 0) for i, prompt in enumerate(prompts)]
    finish(llm)
    requests = [answer.choices[0].request for answer in answers]
    assert [r.output_ids for r in requests] == expected
    assert requests[1].num_preemptions == 0
    assert requests[0].num_preemptions > 0, "priority counts for more than arrival"
    stats = llm.loaded.engine.stats()
    assert (stats.preemptions.swapped > 0) == (kind == "swap")
    assert (stats.preemptions.recomputed > 0) == (kind == "recompute")
    assert stats.swapped_bytes == 0
    decision = json.loads(json.dumps(stats.as_dict()))["preemptions"]["recent"][0]
    assert decision["kind"] == kind
    assert decision["recompute_s"] == decision["recompute_tokens"] / SPEEDS[kind]
    assert decision["swap_s"] == pytest.approx(2 * decision["swap_bytes"] / 25e9)


@pytest.mark.parametrize("kind", SPEEDS)
def test_prompt_logprobs_survive_a_preemption(folder: Path, kind: str) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True, prompt_logprobs=1)
    prompts = [ids(20, seed) for seed in range(4)]
    expected = [engine_of(folder).generate([p], params)[0].prompt_logprobs for p in prompts]
    llm = tight(folder, prefill_tokens_per_s=SPEEDS[kind], max_num_batched_tokens=23)
    outputs = llm.generate(prompts, params)
    assert llm.loaded.engine.stats().preemptions.recent
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.prompt_logprobs is not None
        assert wanted is not None
        assert len(output.prompt_logprobs) == 20
        for got, want in zip(output.prompt_logprobs[1:], wanted[1:], strict=True):
            assert got is not None
            assert want is not None
            assert [token for token, _ in got] == [token for token, _ in want]


def test_an_abort_while_swapped_out_frees_the_host_copy(folder: Path) -> None:
    llm = tight(folder, prefill_tokens_per_s=1.0)
    engine = llm.loaded.engine
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    answers = [llm.front.add(ids(20, seed), params) for seed in range(4)]
    swapped: list[Any] = []
    while not swapped:
        llm.front.step()
        swapped = [a for a in answers if a.choices[0].request.holding.swapped is not None]
    assert engine.stats().swapped_bytes > 0
    assert engine.mover.host_bytes == engine.stats().swapped_bytes
    for answer in swapped:
        assert answer.choices[0].request.status is RequestStatus.WAITING
        llm.front.abort(answer)
    assert engine.stats().swapped_bytes == 0
    engine.check_integrity()
    finish(llm)
    assert engine.mover.host_bytes == 0


def test_without_room_on_the_host_it_is_recomputed_and_said(folder: Path) -> None:
    llm = tight(folder, prefill_tokens_per_s=1.0, swap_bytes=0)
    llm.generate([ids(20, seed) for seed in range(4)], SamplingParams(max_tokens=60, ignore_eos=True))
    preemptions = llm.loaded.engine.stats().preemptions
    assert preemptions.swapped == 0
    assert any(decision.is_host_full for decision in preemptions.recent)


def test_a_higher_priority_gets_in_at_once(folder: Path) -> None:
    """All slots are taken by others; who comes with a lower number runs in the next step."""
    llm = engine_of(folder, max_num_seqs=2)
    low = [llm.front.add(ids(20, seed), SamplingParams(max_tokens=50, ignore_eos=True), priority=5) for seed in (0, 1)]
    for _ in range(5):
        llm.front.step()
    equal = llm.front.add(ids(20, 2), PARAMS, priority=5)
    urgent = llm.front.add(ids(20, 3), PARAMS)
    llm.front.step()
    assert urgent.choices[0].request.status is RequestStatus.RUNNING
    assert equal.choices[0].request.status is RequestStatus.WAITING
    assert [a.choices[0].request.num_preemptions for a in low] == [0, 1]
    finish(llm)
    assert all(len(a.choices[0].request.output_ids) == 50 for a in low)


def test_the_host_copy_of_a_swapped_out_request_goes_with_it(folder: Path) -> None:
    """An abort of the last request, which had made room, leaves nothing on the host, without another step."""
    llm = tight(folder, swap_bytes=1 << 26, prefill_tokens_per_s=1e-3, prefix_caching=False)
    engine = llm.loaded.engine
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    answers = [llm.front.add(ids(30, seed), params) for seed in range(4)]
    while not any(a.choices[0].request.holding.swapped for a in answers):
        llm.front.step()
    assert engine.mover.host_bytes > 0
    for answer in answers:
        llm.front.abort(answer)
    engine.check_integrity()
    assert engine.mover.host_bytes == 0


def test_what_an_invariant_request_said_is_not_reused_for_it(tiny_folder: Callable[..., Path]) -> None:
    """Another one's prompt has the same tokens, and is published; after preemption they are consumed one by one."""
    llm = LLM(
        tiny_folder("MEM*-", conv_gain=30.0), dtype="float32", max_model_len=512, invariant=True, swap_bytes=0,
        max_num_batched_tokens=256,
    )  # fmt: skip
    engine = llm.loaded.engine
    prompt = ids(20, 0)
    first = engine.add_request("first", prompt, SamplingParams(max_tokens=130, ignore_eos=True))
    while len(first.output_ids) < 100:
        engine.step()
    said = prompt + first.output_ids
    other = engine.add_request("other", said, SamplingParams(max_tokens=2, ignore_eos=True))
    while not other.is_finished:
        engine.step()
    engine.scheduler._preempt(first)
    engine.mover.apply(engine.scheduler.take_movements())
    computed = []
    while first.num_computed < len(prompt) or not computed:
        engine.step()
        computed.append(first.num_computed)
    assert computed[-1] <= len(prompt)
    third = engine.add_request("third", said, SamplingParams(max_tokens=1, ignore_eos=True))
    while not third.is_finished:
        engine.step()
    assert third.num_cached_tokens > len(prompt), "a prompt may be reused as far as it goes"
    while not first.is_finished:
        engine.step()
    engine.check_integrity()
