"""Sampler: from requests to ids (masks, penalties, seeds, forced ids) and log-probabilities of raw logits."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
import torch

from hemiola.config.sampling import SamplingParams
from hemiola.engine.sampler import Sampler
from hemiola.ops import KeptForms, Ops
from hemiola.ops.table import Path

VOCAB = 20
EOS = (2, 11)


@dataclass
class Request:
    """The part of a request that the sampler reads."""

    params: SamplingParams = field(default_factory=SamplingParams)
    prompt_ids: list[int] = field(default_factory=lambda: [1])
    output_ids: list[int] = field(default_factory=list)
    seed: int = 0
    constraint: None = None

    @property
    def num_outputs(self) -> int:
        return len(self.output_ids)


def next_ids(sampler: Sampler, logits: torch.Tensor, requests: list[Request]) -> list[int]:
    """What each request gets, the forced ids included."""
    sampled = sampler.sample(logits, requests).tolist()
    return [sampler.settle(request, token) for request, token in zip(requests, sampled, strict=True)]


def make(eos: Iterable[int] = EOS, vocab: int = VOCAB) -> tuple[Sampler, Ops]:
    ops = Ops("reference", KeptForms(0))
    return Sampler(ops, vocab, eos), ops


def ranked(*ids: int) -> torch.Tensor:
    """(V,) logits whose best ids are `ids`, in this order, one apart; the rest is far below."""
    logits = torch.full((VOCAB,), -10.0)
    for place, token_id in enumerate(ids):
        logits[token_id] = 10.0 - place
    return logits


def next_id(logits: torch.Tensor, request: Request) -> int:
    (token_id,) = next_ids(make()[0], logits[None], [request])
    return token_id


def test_the_op_of_the_table_runs_and_is_counted() -> None:
    sampler, ops = make()
    assert next_ids(sampler, torch.stack([ranked(4), ranked(9)]), [Request(), Request()]) == [4, 9]
    assert ops.snapshot() == {Path("sample", "reference", "torch", ""): 1}


def test_min_tokens_holds_back_every_end_until_it_is_reached() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=[5])
    logits = ranked(2, 5, 11, 8)
    assert [next_id(logits, Request(params, output_ids=[8] * n)) for n in range(4)] == [8, 8, 2, 2]


def test_min_tokens_beats_a_bias_towards_an_end() -> None:
    params = SamplingParams(min_tokens=1, logit_bias={2: 100.0, 8: 1.0})
    assert next_id(ranked(2, 3), Request(params)) == 3
    assert next_id(ranked(2, 3), Request(params, output_ids=[3])) == 2


def test_an_ignored_eos_is_no_end() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=[5], ignore_eos=True)
    assert next_id(ranked(5, 11), Request(params)) == 11


def test_min_tokens_with_every_id_an_end_still_answers() -> None:
    params = SamplingParams(min_tokens=1, stop_token_ids=list(range(VOCAB)), temperature=1.0)
    assert next_id(ranked(4), Request(params)) == 0


def test_eos_ids_outside_the_vocabulary_are_harmless() -> None:
    sampler, _ = make(eos=(2, VOCAB, -1))
    assert next_ids(sampler, ranked(2, 3)[None], [Request(SamplingParams(min_tokens=1))]) == [3]


def test_repetition_sees_prompt_and_output_and_the_others_only_output() -> None:
    logits = ranked(6, 7, 8)
    for fields, expected in (
        ({"repetition_penalty": 2.0}, 8),
        ({"presence_penalty": 2.0}, 6),
        ({"frequency_penalty": 2.0}, 6),
    ):
        request = Request(SamplingParams(**fields), prompt_ids=[6, 6, 1], output_ids=[7])  # type: ignore[arg-type]
        assert next_id(logits, request) == expected
    request = Request(SamplingParams(presence_penalty=1.5), prompt_ids=[1], output_ids=[6, 6])
    assert next_id(logits, request) == 7


def test_frequency_counts_occurrences() -> None:
    logits = ranked(6, 7, 8, 9, 10)
    for count, expected in ((0, 6), (1, 6), (2, 7)):
        request = Request(SamplingParams(frequency_penalty=0.8), output_ids=[6] * count)
        assert next_id(logits, request) == expected


def test_last_id_of_the_vocabulary_can_be_biased_and_masked() -> None:
    assert next_id(ranked(3), Request(SamplingParams(logit_bias={VOCAB - 1: 100.0}))) == VOCAB - 1
    params = SamplingParams(min_tokens=1, stop_token_ids=[VOCAB - 1])
    assert next_id(ranked(VOCAB - 1, 3), Request(params)) == 3


def test_a_mixed_batch_equals_each_request_alone() -> None:
    sampler, _ = make()
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1))
    requests = [
        Request(SamplingParams()),
        Request(SamplingParams(temperature=1.0), seed=5),
        Request(SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.01), seed=6, output_ids=[3, 3, 4]),
        Request(SamplingParams(logit_bias={7: 3.0}, min_tokens=1)),
        Request(SamplingParams(temperature=1.2, repetition_penalty=1.3, presence_penalty=0.1), seed=7, prompt_ids=[3]),
        Request(SamplingParams(temperature=1.0, forced_output_ids=[9])),
    ]
    alone = [next_ids(sampler, logits[i : i + 1], [request])[0] for i, request in enumerate(requests)]
    assert next_ids(sampler, logits, requests) == alone
    assert next_ids(sampler, logits.flip(0), requests[::-1]) == alone[::-1]


def test_the_draw_depends_on_seed_and_output_length_only() -> None:
    params = SamplingParams(temperature=1.0)
    logits = torch.zeros(VOCAB)
    first = [next_id(logits, Request(params, output_ids=[4] * n, seed=9)) for n in range(12)]
    other_history = [next_id(logits, Request(params, prompt_ids=[5, 6], output_ids=[7] * n, seed=9)) for n in range(12)]
    assert first == other_history
    assert len(set(first)) > 3
    assert [next_id(logits, Request(params, output_ids=[4] * n, seed=10)) for n in range(12)] != first


def test_forced_ids_replace_the_choice_while_they_last() -> None:
    params = SamplingParams(forced_output_ids=[7, 2], min_tokens=3, temperature=1.0, top_k=1)
    logits = ranked(2, 4)
    assert [next_id(logits, Request(params, output_ids=[0] * n)) for n in range(4)] == [7, 2, 4, 2]


def test_top_logprobs_are_best_first_with_ties_to_the_lower_id() -> None:
    sampler, _ = make()
    logits = torch.full((2, VOCAB), -1.0)
    logits[0, [13, 4, 8]] = 2.0
    logits[1, 17] = 0.5
    first, second = sampler.top_logprobs(logits, 2, [8, 17])
    assert [i for i, _ in first] == [4, 8]
    assert [i for i, _ in second] == [17, 0]
    exact = logits.double().log_softmax(-1)
    for row, entries in enumerate((first, second)):
        for token_id, logprob in entries:
            assert logprob == pytest.approx(float(exact[row, token_id]), abs=1e-6)


@pytest.mark.parametrize(("k", "expected"), [(0, [13]), (1, [4, 13]), (2, [4, 8, 13]), (3, [4, 8, 13])])
def test_the_chosen_id_is_appended_where_it_is_not_among_the_best(k: int, expected: list[int]) -> None:
    logits = torch.full((1, VOCAB), -1.0)
    logits[0, [13, 4, 8]] = 2.0
    (entries,) = make()[0].top_logprobs(logits, k, [13])
    assert [i for i, _ in entries] == expected


def test_minus_one_reports_the_whole_vocabulary() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    for row, entries in zip(logits, make()[0].top_logprobs(logits, -1, [0, 1, 2]), strict=True):
        assert [i for i, _ in entries] == sorted(range(VOCAB), key=lambda i: (-float(row[i]), i))
        assert math.fsum(math.exp(logprob) for _, logprob in entries) == pytest.approx(1.0, abs=1e-6)


def test_top_logprobs_of_many_rows_equal_those_of_each_row() -> None:
    sampler, _ = make()
    logits = torch.randn(131, VOCAB, generator=torch.Generator().manual_seed(4)).bfloat16().float()
    chosen = [i % VOCAB for i in range(131)]
    together = sampler.top_logprobs(logits, 3, chosen)
    assert together == [sampler.top_logprobs(logits[i : i + 1], 3, chosen[i : i + 1])[0] for i in range(131)]
    assert len(together) == 131


def test_logprobs_rank_as_the_logits_do_where_rounding_merges_them() -> None:
    """Two logits one float32 step apart have one log-probability; the greedy choice is still listed first."""
    logits = torch.full((1, VOCAB), 40.0)
    logits[0, 3] = 1e-7
    logits[0, 4] = 2e-7
    (entries,) = make()[0].top_logprobs(logits, -1, [4])
    assert [i for i, _ in entries][-2:] == [4, 3]
    assert entries[-1][1] == entries[-2][1]


def test_no_rows_no_logprobs() -> None:
    assert make()[0].top_logprobs(torch.empty(0, VOCAB), 5, []) == []
