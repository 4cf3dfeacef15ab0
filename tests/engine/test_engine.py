"""Engine and Front: what a request asks for is what it gets, whoever runs beside it, and nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hemiola import LLM, SamplingParams
from hemiola.config.engine import EngineConfig
from hemiola.engine.request import FinishReason, RequestStatus
from hemiola.errors import CapacityError, ConfigError, RequestError
from hemiola.front import Answer, Front
from hemiola.loading import load
from tests.support.recurrence import Recurrence, Weights
from tests.support.scripted_model import scripted_front

VOCAB = 512
Folder = Callable[..., Path]


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(12, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def folder(tiny_folder: Folder) -> Path:
    return tiny_folder("MEM*E-")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, max_num_seqs=6, max_num_batched_tokens=24, max_model_len=128)


def run(llm: LLM, prompts: Sequence[list[int]], *params: SamplingParams) -> list[list[int]]:
    """Token ids of the first choice of each prompt; params: one for all, or one each."""
    outputs = llm.generate(list(prompts), params[0] if len(params) == 1 else list(params))
    assert_idle(llm.front)
    return [output.outputs[0].token_ids for output in outputs]


def assert_idle(front: Front) -> None:
    scheduler = front.engine.scheduler
    scheduler.check_integrity()
    assert not front.has_unfinished
    assert not front.engine.requests
    assert not scheduler.waiting
    assert not scheduler.running
    assert (scheduler.blocks.num_free, scheduler.slots.num_free) == (scheduler.blocks.size, scheduler.slots.size)


# Choosing tokens

RANDOM = {"temperature": 1.5, "max_tokens": 12, "ignore_eos": True}


def test_greedy_is_the_default_and_the_references_choice(llm: LLM, folder: Path) -> None:
    prompt = ids(20)
    (got,) = run(llm, [prompt], SamplingParams(max_tokens=8, ignore_eos=True))
    assert got == Recurrence(Weights(folder)).greedy(prompt, 8)


def test_choices_with_a_seed_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=11, **RANDOM)
    first, again = (llm.generate([ids(9)], params)[0].outputs for _ in range(2))
    assert [choice.token_ids for choice in first] == [choice.token_ids for choice in again]
    assert len({tuple(choice.token_ids) for choice in first}) == 4
    assert [choice.index for choice in first] == [0, 1, 2, 3]


def test_choices_without_a_seed_differ(llm: LLM) -> None:
    outputs = llm.generate([ids(9)], SamplingParams(n=4, **RANDOM))[0].outputs
    assert len({tuple(choice.token_ids) for choice in outputs}) == 4


def test_a_seed_means_the_same_in_any_company(llm: LLM) -> None:
    """Alone, first, last, beside greedy and random neighbours, and in another order of arrival."""
    prompt, params = ids(9), SamplingParams(seed=5, **RANDOM)
    (alone,) = run(llm, [prompt], params)
    others = [SamplingParams(max_tokens=12), SamplingParams(seed=6, **RANDOM), SamplingParams(**RANDOM)]
    for place in range(4):
        prompts, each = [ids(n, n) for n in (3, 14, 7)], list(others)
        prompts.insert(place, prompt)
        each.insert(place, params)
        assert run(llm, prompts, *each)[place] == alone
    assert run(llm, [prompt], SamplingParams(seed=6, **RANDOM)) != [alone]


def test_the_engines_seed_is_the_base_of_all_others(folder: Path) -> None:
    runs = [run(LLM(folder, seed=seed), [ids(9), ids(9)], SamplingParams(**RANDOM)) for seed in (0, 0, 1)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert runs[0][0] != runs[0][1]


def test_a_bias_decides(llm: LLM) -> None:
    for token in (0, VOCAB - 1):
        assert run(llm, [ids(9)], SamplingParams(max_tokens=3, logit_bias={token: 100.0}, ignore_eos=True)) == [
            [token] * 3
        ]
    (free,) = run(llm, [ids(9)], SamplingParams(max_tokens=1, ignore_eos=True))
    (barred,) = run(llm, [ids(9)], SamplingParams(max_tokens=1, logit_bias={free[0]: -100.0}, ignore_eos=True))
    assert barred != free


def test_penalties_look_at_prompt_and_output(llm: LLM) -> None:
    """With a presence penalty at its most a pull towards one id ends after it has been said."""
    params = {"max_tokens": 2, "ignore_eos": True}
    (free,) = run(llm, [ids(9)], SamplingParams(**params, logit_bias={40: 20.0}))
    assert free == [40, 40]
    (penalised,) = run(llm, [ids(9)], SamplingParams(**params, logit_bias={40: 20.0}, repetition_penalty=50.0))
    assert penalised[0] == 40
    assert penalised[1] != 40
    (in_prompt,) = run(llm, [[*ids(9), 40]], SamplingParams(**params, logit_bias={40: 20.0}, repetition_penalty=50.0))
    assert in_prompt[0] != 40


def test_forced_ids_are_said_and_then_the_model_goes_on(llm: LLM, folder: Path) -> None:
    prompt, forced = ids(9), [20, 21, 22]
    output = llm.generate(
        [prompt], SamplingParams(max_tokens=6, ignore_eos=True, forced_output_ids=forced, logprobs=0)
    )[0].outputs[0]
    assert output.token_ids == forced + Recurrence(Weights(folder)).greedy(prompt + forced, 3)
    assert output.logprobs is not None
    assert [[token for token, _ in entry] for entry in output.logprobs] == [[token] for token in output.token_ids]


# Ends


def scripted(script: list[int], **params: Any) -> Any:
    front = scripted_front({(5, 6): script})
    answer = front.add([5, 6], SamplingParams(**params))
    while front.has_unfinished:
        front.step()
    assert_idle(front)
    return answer.choices[0].request


@pytest.mark.parametrize(
    ("script", "params", "said", "reason", "stop_reason"),
    [
        ([20, 2, 21], {}, [20, 2], FinishReason.STOP, None),
        ([20, 11, 21], {}, [20, 11], FinishReason.STOP, None),
        ([20, 2, 21], {"ignore_eos": True, "max_tokens": 3}, [20, 2, 21], FinishReason.LENGTH, None),
        ([20, 21, 22], {"stop_token_ids": [21]}, [20, 21], FinishReason.STOP, 21),
        ([20, 2, 22], {"stop_token_ids": [2]}, [20, 2], FinishReason.STOP, None),
        ([20, 2, 22], {"stop_token_ids": [2], "ignore_eos": True}, [20, 2], FinishReason.STOP, 2),
        ([20, 21, 22], {"max_tokens": 2}, [20, 21], FinishReason.LENGTH, None),
        ([20, 2], {"max_tokens": 2}, [20, 2], FinishReason.STOP, None),
    ],
)
def test_what_ends_a_request(
    script: list[int], params: dict[str, Any], said: list[int], reason: FinishReason, stop_reason: int | None
) -> None:
    request = scripted(script, **params)
    assert (request.output_ids, request.finish_reason, request.stop_reason) == (said, reason, stop_reason)


def test_min_tokens_hold_back_every_end(folder: Path) -> None:
    """With all weight on an end, it comes as soon as it may and not before; ids are those of config.json here."""
    llm = LLM(folder)
    for end, more in ((2, {}), (77, {"stop_token_ids": [77]})):
        for count in (0, 1, 3):
            params = SamplingParams(max_tokens=8, min_tokens=count, logit_bias={end: 100.0}, **more)
            (got,) = run(llm, [ids(9)], params)
            assert len(got) == count + 1
            assert got[-1] == end
            assert end not in got[:-1]


def test_ends_of_generation_config_count_without_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    """generation_config.json names a second id as a list, config.json only the first."""
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    params = SamplingParams(max_tokens=4, logit_bias={11: 100.0})
    assert run(LLM(tmp_path), [ids(9)], params) == [[11] * 4]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 11]}')
    assert run(LLM(tmp_path), [ids(9)], params) == [[11]]


# Log-probabilities


def assert_ranked(entry: list[tuple[int, float]], want: torch.Tensor, k: int, chosen: int) -> None:
    """k best of the reference's log-probabilities, best first, with the chosen id among them or after them."""
    best = want.topk(max(k, 1)).indices.tolist()[:k]
    expected = best + ([chosen] if chosen not in best else [])
    assert [token for token, _ in entry] == expected
    for token, value in entry:
        assert value == pytest.approx(float(want[token]), abs=1e-4)


@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize("budget", [5, 16, 2048])
def test_log_probabilities_are_the_references(folder: Path, k: int, budget: int) -> None:
    """Of prompt and output, however the prompt is cut: null first, then one entry per token, aligned."""
    llm, prompt = LLM(folder, max_num_batched_tokens=budget), ids(40)
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=k, prompt_logprobs=k, temperature=1.0, seed=2)
    output = llm.generate([prompt], params)[0]
    choice = output.outputs[0]
    want = Recurrence(Weights(folder)).read(prompt + choice.token_ids).log_softmax(-1)
    assert output.prompt_logprobs is not None
    assert choice.logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    assert len(choice.logprobs) == 6
    for position, entry in enumerate([*output.prompt_logprobs[1:], *choice.logprobs]):
        assert entry is not None
        assert_ranked(entry, want[position], k, (prompt + choice.token_ids)[position + 1])


def test_prompt_log_probabilities_of_the_whole_vocabulary_and_of_one_token(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=-1)
    whole, single = llm.generate([ids(3), ids(1)], params)
    assert whole.prompt_logprobs is not None
    for entry in whole.prompt_logprobs[1:]:
        assert entry is not None
        assert sorted(token for token, _ in entry) == list(range(VOCAB))
        assert sum(torch.tensor(value).exp().item() for _, value in entry) == pytest.approx(1.0, abs=1e-4)
    assert single.prompt_logprobs == [None]
    assert whole.outputs[0].logprobs is None


def test_only_who_asks_gets_log_probabilities(llm: LLM) -> None:
    """Prompt and output ones of one request beside a request without, and of a request's first choice only."""
    asks = SamplingParams(max_tokens=3, logprobs=1, prompt_logprobs=1, ignore_eos=True, n=2)
    with_them, without = llm.generate([ids(30), ids(30, 1)], [asks, SamplingParams(max_tokens=3, ignore_eos=True)])
    assert with_them.prompt_logprobs is not None
    assert len(with_them.prompt_logprobs) == 30
    assert [len(choice.logprobs or ()) for choice in with_them.outputs] == [3, 3]
    assert without.prompt_logprobs is None
    assert without.outputs[0].logprobs is None


def test_log_probabilities_keep_to_their_request(llm: LLM) -> None:
    """Several that ask, for different numbers, in one batch: each as alone."""
    prompts = [ids(n, n) for n in (5, 30, 11)]
    each = [SamplingParams(max_tokens=4, ignore_eos=True, logprobs=k, prompt_logprobs=k) for k in (1, 3, 2)]
    together = llm.generate(prompts, each)
    for prompt, params, output in zip(prompts, each, together, strict=True):
        (alone,) = llm.generate([prompt], params)
        got, want = ([*(o.prompt_logprobs or ())[1:], *(o.outputs[0].logprobs or ())] for o in (output, alone))
        assert len(got) == len(want) == len(prompt) + 3
        for a, b in zip(got, want, strict=True):
            assert a is not None
            assert b is not None
            assert [token for token, _ in a] == [token for token, _ in b]
            assert [value for _, value in a] == pytest.approx([value for _, value in b], abs=1e-4)


def test_log_probabilities_are_those_before_bias_and_penalties(llm: LLM) -> None:
    plain = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=-1)
    biased = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=-1, logit_bias={40: 100.0}, temperature=0.3)
    a, b = (llm.generate([ids(9)], params)[0].outputs[0] for params in (plain, biased))
    assert b.token_ids == [40]
    assert a.logprobs == b.logprobs


# Aborts and refusals


STAGES = {"waiting": 0, "in prefill": 1, "at the end of prefill": 3, "decoding": 5}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("n", [1, 3])
def test_an_abort_in_any_stage_frees_everything(llm: LLM, stage: str, n: int) -> None:
    """And the neighbour's answer stays what it is alone."""
    neighbour = SamplingParams(max_tokens=15, ignore_eos=True)
    (alone,) = run(llm, [ids(4, 1)], neighbour)
    other = llm.front.add(ids(4, 1), neighbour)
    answer = llm.front.add(ids(60), SamplingParams(n=n, max_tokens=30, ignore_eos=True))
    for _ in range(STAGES[stage]):
        llm.front.step()
    llm.front.abort(answer)
    for choice in answer.choices:
        assert choice.request.status is RequestStatus.FINISHED
        assert choice.request.finish_reason is FinishReason.ABORT
        assert (choice.request.blocks, choice.request.state_slot) == ([], -1)
    assert llm.front.engine.scheduler.slots.num_free == llm.front.engine.scheduler.slots.size - bool(STAGES[stage])
    llm.front.abort(answer)
    while llm.front.has_unfinished:
        llm.front.step()
    assert other.choices[0].request.output_ids == alone
    assert_idle(llm.front)


def test_an_abort_after_the_end_changes_nothing(llm: LLM) -> None:
    answer: Answer = llm.front.add(ids(4), SamplingParams(max_tokens=2, ignore_eos=True))
    while llm.front.has_unfinished:
        llm.front.step()
    llm.front.abort(answer)
    assert answer.choices[0].request.finish_reason is FinishReason.LENGTH
    assert len(answer.choices[0].request.output_ids) == 2
    assert_idle(llm.front)


def test_refusals_carry_the_arithmetic(folder: Path) -> None:
    """Too long for the model; too long for the cache, though not for the model; and nothing stays behind."""
    plan = load(folder, EngineConfig(max_num_seqs=1)).engine.plan
    llm = LLM(folder, max_num_seqs=1, cache_bytes=plan.slot_bytes * 2 + plan.block_bytes * 4)
    blocks = llm.loaded.engine.plan.num_blocks
    room = 16 * blocks
    with pytest.raises(CapacityError) as error:
        llm.generate([ids(room)], SamplingParams(max_tokens=1))
    assert f"{room} prompt + 1 output = {room + 1} tokens = {blocks + 1} blocks of 16" in str(error.value)
    assert f"at most {blocks} blocks" in str(error.value)
    with pytest.raises(CapacityError, match="expected at most max_model_len 4096"):
        llm.generate([[5]], SamplingParams(max_tokens=4096))
    assert_idle(llm.front)
    assert len(run(llm, [ids(room - 1)], SamplingParams(max_tokens=1))[0]) == 1


def test_request_ids_are_unique(llm: LLM) -> None:
    engine = llm.loaded.engine
    engine.add_request("mine", [5], SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match="request id in use; found mine"):
        engine.add_request("mine", [5], SamplingParams(max_tokens=1))
    engine.finish("mine", FinishReason.ABORT)
    engine.finish("mine", FinishReason.ABORT)
    engine.finish("never seen", FinishReason.ABORT)
    assert_idle(llm.front)


def test_what_needs_a_tokenizer_says_so(llm: LLM) -> None:
    with pytest.raises(RequestError, match="a text prompt needs a tokenizer"):
        llm.generate("text")
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        llm.generate([5], SamplingParams(stop="x"))
    with pytest.raises(RequestError, match="chat needs a tokenizer"):
        llm.chat([{"role": "user", "content": "x"}])
    assert_idle(llm.front)


def test_settings_are_checked(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown setting; found dtyp; expected one of .*dtype"):
        LLM(folder, dtyp="bf16")
    with pytest.raises(ConfigError, match="dtype: unknown value; found 'bfloat16'"):
        LLM(folder, dtype="bfloat16")
    with pytest.raises(ConfigError, match="max_num_seqs: not a positive count"):
        LLM(folder, max_num_seqs=0)
    with pytest.raises(CapacityError, match="holds not even one request"):
        LLM(folder, cache_bytes=10)


def test_a_step_without_requests_does_nothing(llm: LLM) -> None:
    counts = llm.path_counts()
    assert llm.front.step() == []
    assert llm.path_counts() == counts
