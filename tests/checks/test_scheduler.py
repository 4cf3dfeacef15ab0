"""Public bug reports about who runs when: budgets, slots, and neighbours that must not matter, through LLM.

Prefix caching is on, as by default, except where the same prompt has to be computed again. What is about reuse itself
is in test_reuse.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hemiola import LLM, SamplingParams
from hemiola.llm import CompletionOutput
from tests.support.recurrence import Recurrence, Weights
from tests.support.witness import Seen, Witness, widest

Folder = Callable[..., Path]
BOUND = 1e-4
# Two logits that are closer than this may change places when a product is computed in another shape (float32).
NEAR_TIE = 1e-3


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def first_difference(solo: CompletionOutput, batched: CompletionOutput) -> str:
    """Empty where the tokens are equal or part at a near tie of the solo run; else where they part and by how much."""
    for position, (a, b) in enumerate(zip(solo.token_ids, batched.token_ids, strict=True)):
        if a != b:
            assert solo.logprobs is not None
            (_, best), (_, second) = solo.logprobs[position][:2]
            margin = best - second
            return "" if margin < NEAR_TIE else f"output {position}: {a} or {b}, margin {margin:.3g} (near {NEAR_TIE})"
    return ""


# B24


def test_b24_more_sequences_than_state_slots(tiny_folder: Folder) -> None:
    """64 are asked for and 10 states fit: clamped, said, and all 64 requests complete."""
    folder = tiny_folder("M*-")
    slot_bytes = LLM(folder).loaded.engine.plan.slot_bytes
    llm = LLM(folder, cache_bytes=2 * 11 * slot_bytes - 1, max_num_seqs=64, max_model_len=64)  # half is for states
    engine = llm.loaded.engine
    assert engine.plan.num_slots == 10
    assert engine.scheduler.slots.size == 10
    assert any(note.startswith("max_num_seqs 64 clamped to 10") for note in llm.loaded.notes)
    witness = Witness(engine)
    outputs = llm.generate([ids(9, seed) for seed in range(64)], SamplingParams(max_tokens=4, ignore_eos=True))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4] * 64
    assert max(witness.num_rows) <= 10


# B25


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("budget", [1, 3, 7, 15, 16, 17])
def test_b25_pieces_smaller_than_a_chunk(tiny_folder: Folder, budget: int, prefix_caching: bool) -> None:
    folder = tiny_folder("MEM*E-", conv_gain=30.0)
    prompt, params = ids(50), SamplingParams(max_tokens=6, ignore_eos=True)
    whole = LLM(folder, dtype="float32").generate([prompt], params)[0].outputs[0].token_ids
    llm = LLM(folder, dtype="float32", max_num_batched_tokens=budget, prefix_caching=prefix_caching)
    witness = Witness(llm.loaded.engine)
    assert llm.generate([prompt], params)[0].outputs[0].token_ids == whole
    seen = witness.seen["request-0.0"]
    assert max(seen.pieces) == budget if budget < 17 else max(seen.pieces) == 16, "17 is cut back to the chunk grid"
    assert widest(seen, Recurrence(Weights(folder)).read(seen.ids)) < BOUND


# B26

LENGTHS = [31, 32, 33, 64, 65, 96, 97, 200]


def run_with_limit(llm: LLM, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while llm.front.has_unfinished:
        llm.front.step()
        assert time.monotonic() < end, "hangs"


@pytest.mark.parametrize("length", LENGTHS)
def test_b26_prompts_of_three_and_more_pieces_finish(tiny_folder: Folder, length: int) -> None:
    """Alone, and two of them while a third request decodes; the same tokens."""
    llm = LLM(tiny_folder("M-M*-", conv_gain=30.0), dtype="float32", max_num_batched_tokens=32)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    prompts = [ids(length, 1), ids(length, 2)]
    alone = []
    for prompt in prompts:
        answer = llm.front.add(prompt, params)
        run_with_limit(llm)
        alone.append(answer.choices[0].request.output_ids)
    decoding = llm.front.add(ids(5, 3), SamplingParams(max_tokens=40, ignore_eos=True))
    llm.front.step()
    assert decoding.choices[0].request.output_ids
    together = [llm.front.add(prompt, params) for prompt in prompts]
    run_with_limit(llm)
    assert [answer.choices[0].request.output_ids for answer in together] == alone
    assert len(decoding.choices[0].request.output_ids) == 40


# B27


def together(llm: LLM, witness: Witness, prompts: list[list[int]]) -> Seen:
    """What the first of several prompts that arrive together sees."""
    outputs = llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
    return witness.seen[f"{outputs[0].request_id}.0"]


@pytest.mark.parametrize("scheme", ["f32", "bf16", "lightning"])
def test_b27_the_neighbours_contents_change_no_bit(tiny_folder: Folder, scheme: str) -> None:
    """Batches of equal shape and lengths, with other contents beside the first row."""
    llm = LLM(tiny_folder("MEM*E-", scheme), max_num_batched_tokens=40, prefix_caching=False)
    witness, prompt = Witness(llm.loaded.engine), ids(19)
    lengths = [7, 30, 1]
    first = together(llm, witness, [prompt, *(ids(n, n) for n in lengths)])
    for seed in range(5):
        other = together(llm, witness, [prompt, *(ids(n, 100 * seed + n) for n in lengths)])
        assert other.ids == first.ids
        assert torch.equal(torch.stack(other.logits), torch.stack(first.logits))


@pytest.mark.parametrize("scheme", ["f32", "lightning"])
def test_b27_solo_and_in_company_part_only_at_near_ties(tiny_folder: Folder, scheme: str) -> None:
    llm = LLM(tiny_folder("MEM*E-", scheme), dtype="float32", max_num_batched_tokens=40)
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2)
    prompts = [ids(n, n) for n in (19, 7, 30, 1)]
    company = llm.generate(prompts, params)
    for prompt, output in zip(prompts, company, strict=True):
        (solo,) = llm.generate([prompt], params)
        assert first_difference(solo.outputs[0], output.outputs[0]) == ""


def test_b27_a_difference_is_named_with_its_margin() -> None:
    def output(token_ids: list[int], second: float) -> CompletionOutput:
        return CompletionOutput(0, "", token_ids, [[(t, -1.0), (9, second)] for t in token_ids], "length", None)

    assert first_difference(output([1, 2], -1.5), output([1, 3], -1.5)) == "output 1: 2 or 3, margin 0.5 (near 0.001)"
    assert first_difference(output([1, 2], -1.0005), output([1, 3], -1.5)) == ""
