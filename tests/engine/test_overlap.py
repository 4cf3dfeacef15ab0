"""Steps that are launched before the ids of the one before are known: nobody's tokens change, and nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hemiola.config.sampling import SamplingParams
from hemiola.engine.request import FinishReason, Request
from hemiola.llm import LLM
from hemiola.model.batch import PENDING
from tests.support.tiny_checkpoint import write_tiny_checkpoint
from tests.support.tiny_tokenizer import build_tokenizer
from tests.support.variants import tiny
from tests.support.witness import poison

Folder = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tiny_folder: Folder) -> Path:
    return tiny_folder("MEM*-", conv_gain=30.0)


@pytest.fixture(scope="module")
def folder_with_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "model"
    write_tiny_checkpoint(folder, tiny("M*-", vocab_size=576), "f32", conv_gain=30.0)
    return build_tokenizer(folder)


def overlapping(folder: Path, **settings: Any) -> LLM:
    llm = LLM(folder, **({"dtype": "float32", "max_model_len": 256} | settings))
    poison(llm.loaded.engine)
    llm.loaded.engine.overlaps = True
    return llm


def ids(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(20, 90), k=count)


MIXED = [
    SamplingParams(max_tokens=9, ignore_eos=True),
    SamplingParams(max_tokens=1, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0.9, seed=3, top_p=0.9),
    SamplingParams(max_tokens=7, min_tokens=3, temperature=1.2, seed=4),
    SamplingParams(max_tokens=8, repetition_penalty=1.3, ignore_eos=True),
    SamplingParams(max_tokens=5, logprobs=3),
    SamplingParams(max_tokens=5, prompt_logprobs=2),
    SamplingParams(max_tokens=2, ignore_eos=True),
]


@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 3}, {"max_num_batched_tokens": 24, "max_num_seqs": 5}])
def test_every_kind_of_request_gets_what_it_gets_alone(folder: Path, settings: dict[str, Any]) -> None:
    prompts = [ids(5 + 9 * i, i) for i in range(len(MIXED))]
    plain = LLM(folder, dtype="float32", max_model_len=256)
    expected = [plain.generate(prompt, params)[0] for prompt, params in zip(prompts, MIXED, strict=True)]
    llm = overlapping(folder, **settings)
    outputs = llm.generate(prompts, MIXED)
    for got, wanted in zip(outputs, expected, strict=True):
        assert got.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert got.outputs[0].finish_reason == wanted.outputs[0].finish_reason
        assert [[i for i, _ in top] for top in got.outputs[0].logprobs or []] == [
            [i for i, _ in top] for top in wanted.outputs[0].logprobs or []
        ]
    engine = llm.loaded.engine
    engine.check_integrity()
    assert engine.scheduler.slots.num_free == engine.scheduler.slots.size


class Following:
    """Allows one of three ids next, by those said before; may not be asked once its request has ended."""

    def __init__(self) -> None:
        self.said: list[int] = []
        self.request: Request | None = None
        self.is_finished = False

    @property
    def num_accepted(self) -> int:
        return len(self.said)

    def accept(self, token_id: int) -> None:
        assert token_id in self.allowed
        self.said.append(token_id)

    def fill(self, mask: torch.Tensor) -> bool:
        assert self.request is not None
        assert not self.request.is_finished, "asked after the end"
        assert self.said == self.request.output_ids, "asked before all ids are known"
        mask.zero_()
        for i in self.allowed:
            mask[i // 32] |= 1 << i % 32
        return True

    @property
    def allowed(self) -> set[int]:
        return {20 + (sum(self.said) + step) % 30 for step in (len(self.said), 7, 19)}


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_constraint_knows_all_ids_and_is_not_asked_after_the_end(folder: Path, overlaps: bool) -> None:
    """Beside others, with a stop id that nobody foresees."""
    llm = overlapping(folder)
    llm.loaded.engine.overlaps = overlaps
    free = SamplingParams(max_tokens=9, ignore_eos=True)
    constrained = [SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=list(range(20, 50, 3))), free]
    answers = [llm.front.add(ids(8, seed), params) for seed, params in enumerate([*constrained, free])]
    requests = [answer.choices[0].request for answer in answers]
    for request in requests[:2]:
        request.constraint = following = Following()
        following.request = request
    while llm.front.has_unfinished:
        llm.front.step()
    assert [request.error for request in requests] == [None] * 3
    assert [request.finish_reason for request in requests] == [FinishReason.STOP, *[FinishReason.LENGTH] * 2]
    assert 1 < len(requests[0].output_ids) < 9


@pytest.mark.parametrize("params", [{}, {"repetition_penalty": 1.3}, {"temperature": 0.7}])
def test_a_step_is_launched_with_the_token_pending(
    folder: Path, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]
) -> None:
    llm = overlapping(folder)
    launched: list[list[int]] = []
    launch = llm.loaded.engine.runner.launch

    def spy(rows: Any, due: Any) -> Any:
        launched.append([row.token_ids[0] for row in rows])
        return launch(rows, due)

    monkeypatch.setattr(llm.loaded.engine.runner, "launch", spy)
    output = llm.generate(ids(6, 0), SamplingParams(max_tokens=5, ignore_eos=True, **params))[0].outputs[0]
    assert len(output.token_ids) == 5
    assert launched[1:] == [[PENDING]] * 4, "five tokens take a prompt step and four decodes, not one more"


def test_a_stop_costs_one_dropped_row(folder: Path) -> None:
    prompt = ids(6, 1)
    free = LLM(folder, dtype="float32").generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True))
    said = free[0].outputs[0].token_ids
    stop = said[4]
    llm = overlapping(folder)
    output = llm.generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=[stop]))[0].outputs[0]
    assert output.token_ids == said[: said.index(stop) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert llm.loaded.engine.stats().num_decode_tokens == said.index(stop) + 1


def test_aborts_and_preemptions_between_steps(folder: Path) -> None:
    """A pool for two of the requests; some are withdrawn while their step is on its way."""
    plan = LLM(folder).loaded.engine.plan
    prompts = [ids(40, seed) for seed in range(6)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    expected = [LLM(folder, dtype="float32").generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts]
    llm = overlapping(
        folder, max_num_seqs=4, cache_bytes=4 * plan.slot_bytes + max(11 * plan.block_bytes, 4 * plan.slot_bytes)
    )
    engine = llm.loaded.engine
    answers = [llm.front.add(prompt, params) for prompt in prompts]
    rng, num_steps = random.Random(5), 0
    while llm.front.has_unfinished:
        llm.front.step()
        engine.check_integrity()
        num_steps += 1
        if num_steps in (4, 9):
            llm.front.abort(rng.choice([a for a in answers if not a.finished]))
    reasons = [a.choices[0].request.finish_reason for a in answers]
    assert reasons.count(FinishReason.ABORT) == 2
    assert sum(a.choices[0].request.num_preemptions for a in answers) > 0
    for answer, wanted in zip(answers, expected, strict=True):
        said = answer.choices[0].request.output_ids
        assert said == wanted[: len(said)]
        assert answer.choices[0].request.finish_reason is FinishReason.ABORT or said == wanted


def test_a_step_that_fails_spoils_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [ids(30, seed) for seed in range(3)]
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    expected = [LLM(folder, dtype="float32").generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts]
    llm = overlapping(folder)
    runner, launch, count = llm.loaded.engine.runner, llm.loaded.engine.runner.launch, [0]

    def fails_once(rows: Any, due: Any) -> Any:
        count[0] += 1
        if count[0] == 5:
            raise RuntimeError("out of luck")
        return launch(rows, due)

    monkeypatch.setattr(runner, "launch", fails_once)
    answers = [llm.front.add(prompt, params) for prompt in prompts]
    num_faults = 0
    while llm.front.has_unfinished:
        try:
            llm.front.step()
        except RuntimeError:
            num_faults += 1
    assert num_faults == 1
    assert [a.choices[0].request.output_ids for a in answers] == expected


def test_ids_that_arrived_before_a_step_failed_are_told_by_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a request that they have finished; not those of one that was withdrawn in between."""
    prompts = [ids(30, seed) for seed in range(3)]
    lengths = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 10, 10)]
    expected = [
        LLM(folder, dtype="float32").generate(p, n)[0].outputs[0].token_ids
        for p, n in zip(prompts, lengths, strict=True)
    ]
    llm = overlapping(folder)
    scheduler = llm.loaded.engine.scheduler
    complete, count = scheduler.complete, [0]

    def fails_once(rows: Any) -> None:
        count[0] += 1
        if count[0] == 5:
            raise RuntimeError("out of luck")
        complete(rows)

    monkeypatch.setattr(scheduler, "complete", fails_once)
    answers = [llm.front.add(prompt, params) for prompt, params in zip(prompts, lengths, strict=True)]
    told: dict[str, list[int]] = {answer.request_id: [] for answer in answers}
    num_faults = 0
    while llm.front.has_unfinished:
        try:
            for delta in llm.front.step():
                told[delta.answer.request_id] += delta.new_ids
        except RuntimeError:
            num_faults += 1
            assert answers[0].choices[0].request.output_ids == expected[0], "its last id came before the fault"
            assert len(told[answers[0].request_id]) == 2
            llm.front.abort(answers[1])
    assert num_faults == 1
    assert told[answers[0].request_id] == expected[0]
    assert told[answers[2].request_id] == expected[2]
    assert answers[1].choices[0].request.finish_reason is FinishReason.ABORT


@pytest.mark.parametrize("arrival", range(1, 6))
def test_a_request_that_ends_in_a_step_that_another_waits_for(folder: Path, arrival: int) -> None:
    """Its last two ids come at once: the one on its way, and that of the step, which the host waits for."""
    params, other = SamplingParams(max_tokens=4, ignore_eos=True), SamplingParams(max_tokens=3, logprobs=2)
    plain = LLM(folder, dtype="float32")
    expected = [plain.generate(ids(30, seed), p)[0].outputs[0].token_ids for seed, p in ((0, params), (1, other))]
    llm = overlapping(folder)
    answers = [llm.front.add(ids(30, 0), params)]
    told: dict[str, list[int]] = {"request-0": [], "request-1": []}
    num_steps = 0
    while llm.front.has_unfinished:
        if num_steps == arrival:
            answers.append(llm.front.add(ids(30, 1), other))
        for delta in llm.front.step():
            told[delta.answer.request_id] += delta.new_ids
        num_steps += 1
    if len(answers) == 1:
        pytest.skip("it was over before the other one came")
    assert list(told.values()) == expected


@pytest.mark.parametrize("arrival", range(1, 9))
def test_nothing_counts_after_a_stop_string(folder_with_text: Path, arrival: int) -> None:
    """Also where a step brings the id that completes it and the next one, because another request made it wait."""
    prompt = ids(8, 0)
    text = LLM(folder_with_text, dtype="float32").generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True))[0]
    middle = len(text.outputs[0].text) // 2
    params = SamplingParams(max_tokens=12, ignore_eos=True, stop=[text.outputs[0].text[middle : middle + 2]])
    alone = LLM(folder_with_text, dtype="float32").generate(prompt, params)[0].outputs[0]
    llm = overlapping(folder_with_text)
    answer, num_steps, told = llm.front.add(prompt, params), 0, list[int]()
    while llm.front.has_unfinished:
        if num_steps == arrival:
            llm.front.add(ids(5, 9), SamplingParams(max_tokens=3, repetition_penalty=1.3, ignore_eos=True))
        for delta in llm.front.step():
            told += delta.new_ids if delta.answer is answer else []
        num_steps += 1
    choice = answer.choices[0]
    assert (choice.text, choice.request.output_ids, told) == (alone.text, alone.token_ids, alone.token_ids)
    assert choice.request.finish_reason is FinishReason.STOP
