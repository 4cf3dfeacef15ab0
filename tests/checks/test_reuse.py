"""Public bug reports about reused prefixes on hybrids, through LLM: what is reused, how much, and that it is right.

float32 throughout; "the same" is the same tokens, and logits within 1e-4 of a separate recurrence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.multi_turn import Trace, converse
from hemiola import LLM, SamplingParams
from hemiola.cache.prefix import MissReason
from hemiola.engine.request import Request
from tests.support.recurrence import Recurrence, Weights
from tests.support.witness import Witness, poison

Folder = Callable[..., Path]
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
BOUND = 1e-4


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def engine_of(folder: Path, **settings: Any) -> LLM:
    """On poisoned caches: a read of what nobody wrote is NaN."""
    llm = LLM(folder, **({"dtype": "float32", "max_model_len": 512} | settings))
    poison(llm.loaded.engine)
    return llm


def run(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams = PARAMS) -> list[Request]:
    """All at once; the requests, finished."""
    answers = [llm.front.add(prompt, params) for prompt in prompts]
    while llm.front.has_unfinished:
        llm.front.step()
        llm.loaded.engine.check_integrity()
    return [answer.choices[0].request for answer in answers]


def cold(folder: Path, prompt: list[int], params: SamplingParams = PARAMS) -> list[int]:
    (request,) = run(engine_of(folder, prefix_caching=False), [prompt], params)
    return request.output_ids


# B17


@pytest.mark.parametrize("chunk_size", [16, 64])
@pytest.mark.parametrize("lengths", [(50, 70, 90), (32, 37, 48)])
def test_b17_snapshots_of_a_packed_prefill_are_each_ones_own(
    tiny_folder: Folder, lengths: tuple[int, ...], chunk_size: int
) -> None:
    """Prefilled together in all six orders, each continued from its snapshot: as the same prompt alone and cold."""
    folder = tiny_folder("MEM*-", overrides={"chunk_size": chunk_size}, conv_gain=30.0)
    prompts = {length: ids(length, length) for length in lengths}
    longer = {length: prompt + ids(9, 1000 + length) for length, prompt in prompts.items()}
    expected = {length: cold(folder, prompt) for length, prompt in longer.items()}
    for order in permutations(lengths):
        llm = engine_of(folder)
        witness = Witness(llm.loaded.engine)
        run(llm, [prompts[length] for length in order])
        for length in order:
            (request,) = run(llm, [longer[length]])
            assert request.output_ids == expected[length], f"{length} in {order}"
            assert request.num_cached_tokens == length // 16 * 16
            want = Recurrence(Weights(folder)).read(longer[length])[request.num_cached_tokens :]
            got = torch.stack(witness.seen[request.request_id].logits)[: len(want)]
            assert (got.double() - want).abs().max() < BOUND


# B19


@pytest.mark.parametrize("chunk_size", [16, 64])
def test_b19_an_aborted_prefill_leaves_only_what_it_computed(tiny_folder: Folder, chunk_size: int) -> None:
    folder = tiny_folder("MEM*-", overrides={"chunk_size": chunk_size}, conv_gain=30.0)
    prompt = ids(12 * 16, 1)
    llm = engine_of(folder, max_num_batched_tokens=64)
    answer = llm.front.add(prompt, PARAMS)
    for _ in range(2):
        llm.front.step()
    computed = answer.choices[0].request.num_computed
    assert computed == 128
    llm.front.abort(answer)
    (again,) = run(llm, [prompt])
    assert again.num_cached_tokens == computed
    assert again.output_ids == cold(folder, prompt)


def test_b19_a_second_client_while_the_first_is_prefilling(tiny_folder: Folder) -> None:
    """It waits for the prefix that is under way, never gets more than was computed, and does not wait for ever."""
    folder = tiny_folder("MEM*-", conv_gain=30.0)
    prompt = ids(12 * 16, 2)
    for ends in ("finished", "aborted"):
        llm = engine_of(folder, max_num_batched_tokens=64)
        first = llm.front.add(prompt, PARAMS)
        llm.front.step()
        second = llm.front.add(prompt, PARAMS).choices[0].request
        llm.front.step()
        assert second.num_cached_tokens is None, "it waits"
        computed = first.choices[0].request.num_computed
        if ends == "aborted":
            llm.front.abort(first)
        run(llm, [])
        assert second.output_ids == cold(folder, prompt)
        assert second.num_cached_tokens == (computed if ends == "aborted" else 11 * 16)


# B20


@pytest.mark.parametrize("chunk_size", [16, 64])
def test_b20_a_shared_prefix_with_other_tails(tiny_folder: Folder, chunk_size: int) -> None:
    """The second request finds KV and no state, says so, and leaves a state there; from the third on all reuse it."""
    folder = tiny_folder("MEM*E-", overrides={"chunk_size": chunk_size}, conv_gain=30.0)
    llm, shared = engine_of(folder), ids(160, 3)
    prompts = [shared + ids(tail, tail) for tail in range(40, 121, 10)]
    requests = [run(llm, [prompt])[0] for prompt in prompts]
    assert [r.num_cached_tokens for r in requests] == [0, 0] + [160] * 7
    first, second, third = (r.prefix_miss for r in requests[:3])
    assert first is not None
    assert second is not None
    assert third is not None
    assert first.reason is MissReason.NO_KV
    assert (second.reason, second.num_kv_tokens, second.num_tokens) == (MissReason.NO_STATE, 160, 208)
    assert third.reason is MissReason.NO_KV
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_ids == cold(folder, prompt)
    (again,) = run(llm, [prompts[4]])
    assert again.num_cached_tokens == (len(prompts[4]) - 1) // 16 * 16
    assert again.output_ids == requests[4].output_ids
    totals = llm.loaded.engine.stats().as_dict()["prefix"]
    assert (totals["prompts"], totals["prompts_hit"]) == (10, 8)
    assert totals["misses"] == {"no_kv": 8, "no_state": 1}


@pytest.mark.parametrize("pattern", ["M-M-", "*-*-", "MEM*E-"])
def test_an_identical_resend_hits_in_every_kind_of_pattern(tiny_folder: Folder, pattern: str) -> None:
    folder, prompt = tiny_folder(pattern, conv_gain=30.0), ids(64, 4)
    llm = engine_of(folder)
    first, again = run(llm, [prompt])[0], run(llm, [prompt])[0]
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 48)
    assert first.output_ids == again.output_ids == cold(folder, prompt)


def test_reasons_of_misses(tiny_folder: Folder) -> None:
    folder = tiny_folder("MEM*-")
    llm = engine_of(folder)
    (short,) = run(llm, [ids(16, 1)])
    assert short.prefix_miss is not None
    assert short.prefix_miss.reason is MissReason.TOO_SHORT
    run(llm, [ids(50, 2)])
    (asks,) = run(llm, [ids(50, 2)], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert (asks.num_cached_tokens, len(asks.prompt_logprobs)) == (0, 50)
    assert asks.prefix_miss is not None
    assert (asks.prefix_miss.reason, asks.prefix_miss.num_tokens) == (MissReason.DISABLED, 48)
    (off,) = run(engine_of(folder, prefix_caching=False), [ids(50, 2)])
    assert off.prefix_miss is not None
    assert off.prefix_miss.reason is MissReason.DISABLED
    small = engine_of(folder, max_num_seqs=1, max_model_len=64)  # 8 blocks
    for seed in (3, 4, 5):
        run(small, [ids(50, seed)])
    (gone,) = run(small, [ids(50, 3)])
    assert gone.prefix_miss is not None
    assert gone.prefix_miss.reason is MissReason.EVICTED


# B21


def test_b21_running_out_of_state_slots(tiny_folder: Folder) -> None:
    """Four snapshots' worth of memory, three of them held by cached prefixes, four slots, six requests at once."""
    folder = tiny_folder("MEM*-", conv_gain=30.0)
    slot = LLM(folder).loaded.engine.plan.slot_bytes
    llm = engine_of(folder, max_num_seqs=4, snapshot_bytes=4 * slot)
    prompts = [ids(50, seed) for seed in range(3)]
    run(llm, prompts)
    both = [prompt + ids(5, 9) for prompt in prompts]
    requests = run(llm, [*prompts, *both])
    for prompt, request in zip([*prompts, *both], requests, strict=True):
        assert request.output_ids == cold(folder, prompt)
    scheduler = llm.loaded.engine.scheduler
    assert scheduler.slots.num_free == 4
    assert scheduler.ledger.snapshots.num_pins == scheduler.ledger.snapshots.num_reserved == 0


# B22


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_b22_forks_share_the_prompt(tiny_folder: Folder, n: int) -> None:
    """The first choice computes, the others hit; greedy ones say the same, random ones repeat on a second run."""
    folder, prompt = tiny_folder("MEM*-", conv_gain=30.0), ids(70, 5)
    llm = engine_of(folder)
    expected = cold(folder, prompt)
    answer = llm.front.add(prompt, SamplingParams(n=n, max_tokens=6, ignore_eos=True))
    run(llm, [])
    assert [c.request.num_cached_tokens for c in answer.choices] == [0] + [64] * (n - 1)
    assert all(c.request.output_ids == expected for c in answer.choices)
    random = SamplingParams(n=n, max_tokens=12, temperature=1.5, seed=3, ignore_eos=True)
    runs = [[c.token_ids for c in llm.generate([prompt], random)[0].outputs] for _ in range(2)]
    assert runs[0] == runs[1]
    assert len({tuple(choice) for choice in runs[0]}) == n


# B23


def test_b23_other_blocks_and_slots_change_nothing(tiny_folder: Folder) -> None:
    """A conversation of two turns on six mamba layers, with three block tables: tokens, logits and states per layer."""
    folder = tiny_folder("MM*MMM*-M", conv_gain=30.0)
    turns = [ids(40, 6), ids(23, 7)]
    seen = []
    for strangers in (0, 1, 3):
        llm = engine_of(folder)
        blocking = [llm.front.add(ids(20 + i, 50 + i), SamplingParams(max_tokens=200)) for i in range(strangers)]
        witness = Witness(llm.loaded.engine)
        history, requests = [], []
        for turn in turns:
            answer = llm.front.add(history + turn, PARAMS)
            while not answer.finished:
                llm.front.step()
            requests.append(answer.choices[0].request)
            history = requests[-1].prompt_ids + requests[-1].output_ids
        for other in blocking:
            llm.front.abort(other)
        assert requests[1].num_cached_tokens == 32
        last = witness.seen[requests[1].request_id]
        seen.append((requests[1].output_ids, torch.stack(last.logits), last.ssm))
    for tokens, logits, states in seen[1:]:
        assert tokens == seen[0][0]
        torch.testing.assert_close(logits, seen[0][1], rtol=0, atol=BOUND)
        for layer, state in states.items():
            torch.testing.assert_close(state, seen[0][2][layer], rtol=1e-4, atol=1e-5)


# Host tier, and the trace


def test_snapshots_come_back_from_the_host(tiny_folder: Folder) -> None:
    """Two places on the device, eight on the host, six prompts: all hit when they come again."""
    folder = tiny_folder("MEM*-", conv_gain=30.0)
    slot = LLM(folder).loaded.engine.plan.slot_bytes
    llm = engine_of(folder, snapshot_bytes=2 * slot, host_snapshot_bytes=8 * slot)
    prompts = [ids(100, seed) for seed in range(6)]
    first = [run(llm, [prompt])[0] for prompt in prompts]
    again = [run(llm, [prompt])[0] for prompt in prompts]
    assert [r.num_cached_tokens for r in again] == [96] * 6
    assert [r.output_ids for r in again] == [r.output_ids for r in first]
    stats = llm.loaded.engine.stats()
    assert stats.snapshots.host_hits >= 3
    assert 0 < stats.snapshots_on_host <= 8
    assert llm.loaded.engine.mover.host_bytes == stats.snapshots_on_host * slot


@pytest.mark.parametrize("chunk_size", [16, 64])
def test_multi_turn_chat(tiny_folder: Folder, chunk_size: int) -> None:
    """10 conversations of 8 turns after a shared system prompt of 1,000 tokens: over 90 % reused from the second on,
    within the snapshot budget, and the same conversations as without reuse (three of them, two turns)."""
    folder = tiny_folder("MEM*-", overrides={"chunk_size": chunk_size})
    llm = engine_of(folder, max_model_len=2048)
    turns, _ = converse(llm.front, Trace())
    shares = [turn.share for turn in turns]
    assert min(shares[1:]) > 0.9, shares
    stats = llm.loaded.engine.stats()
    assert 0 < stats.snapshot_bytes_held <= stats.snapshot_bytes_budget
    llm.loaded.engine.check_integrity()
    short = Trace(conversations=3, turns=2)
    with_reuse = converse(engine_of(folder, max_model_len=2048).front, short)[1]
    assert with_reuse == converse(engine_of(folder, max_model_len=2048, prefix_caching=False).front, short)[1]


@pytest.mark.parametrize("scheme", ["f32", "lightning"])
def test_without_a_hit_caching_changes_no_bit(tiny_folder: Folder, scheme: str) -> None:
    """Snapshots are taken inside of pieces and at chunk edges, so that a cold prompt is what it is without them."""
    folder = tiny_folder("MEM*E-", scheme, overrides={"chunk_size": 64})
    for length in (20, 63, 64, 65, 100, 150):
        seen = []
        for is_on in (False, True):
            llm = LLM(folder, prefix_caching=is_on, max_num_batched_tokens=64)
            witness = Witness(llm.loaded.engine)
            run(llm, [ids(length, length)])
            seen.append(witness.seen["request-0.0"])
        assert torch.equal(torch.stack(seen[0].logits), torch.stack(seen[1].logits)), length
