"""Constraints in sampling: masks before all other processing, catching up, and a fault that is one request's own."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from hemiola.config.sampling import SamplingParams
from hemiola.engine.constraint import constrain, unpack
from hemiola.engine.request import FinishReason
from hemiola.engine.sampler import Sampler
from hemiola.errors import RequestError
from hemiola.ops import KeptForms, Ops
from tests.support.scripted_model import scripted_front

VOCAB = 70  # not a multiple of 32


class Allowing:
    """Allows the ids of allowed[n] after n ids; None is anything."""

    is_finished = False

    def __init__(self, *allowed: set[int] | None) -> None:
        self.allowed = allowed
        self.taken: list[int] = []

    @property
    def num_accepted(self) -> int:
        return len(self.taken)

    def accept(self, token_id: int) -> None:
        allowed = self.allowed[len(self.taken)]
        if allowed is not None and token_id not in allowed:
            raise RequestError("not allowed", found=token_id)
        self.taken.append(token_id)

    def fill(self, mask: torch.Tensor) -> bool:
        allowed = self.allowed[len(self.taken)]
        if allowed is None:
            return False
        words = [sum(1 << bit for bit in range(32) if 32 * w + bit in allowed) for w in range(len(mask))]
        mask.copy_(torch.tensor([word - (1 << 32) if word >> 31 else word for word in words], dtype=torch.int32))
        return True


class Failing(Allowing):
    """Lets everything through, and then does not know how to go on."""

    def fill(self, mask: torch.Tensor) -> bool:
        return False


@dataclass
class Request:
    constraint: Allowing | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt_ids: list[int] = field(default_factory=lambda: [1])
    output_ids: list[int] = field(default_factory=list)
    seed: int = 0

    @property
    def num_outputs(self) -> int:
        return len(self.output_ids)


def sample(logits: torch.Tensor, *requests: Request, best: torch.Tensor | None = None) -> list[int]:
    return Sampler(Ops("reference", KeptForms(0)), VOCAB, (2,)).sample(logits, requests, best).tolist()


def test_every_bit_is_its_id() -> None:
    mask = torch.empty(1, 3, dtype=torch.int32)
    for token_id in range(VOCAB):
        Allowing({token_id}).fill(mask[0])
        assert unpack(mask, VOCAB)[0].nonzero().flatten().tolist() == [token_id]


def test_only_constrained_rows_change_and_the_logits_stay_as_they_are() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    allowed = constrain(logits, [Request(), Request(Allowing({0, 31, 32, 69})), Request(Allowing(None))])
    assert torch.equal(logits, before)
    assert torch.equal(allowed[[0, 2]], logits[[0, 2]])
    kept = allowed[1].isfinite().nonzero().flatten().tolist()
    assert kept == [0, 31, 32, 69]
    assert torch.equal(allowed[1, kept], logits[1, kept])


def test_without_constraints_nothing_is_copied() -> None:
    logits = torch.zeros(2, VOCAB)
    assert constrain(logits, [Request(), Request()]) is logits
    assert constrain(logits, [Request(), Request(Allowing(None))]) is logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_and_drawn_choices_stay_inside(dtype: torch.dtype) -> None:
    logits = torch.zeros(1, VOCAB, dtype=dtype)
    logits[0, 5] = 9.0
    greedy = Request(Allowing({33, 40}))
    assert sample(logits, greedy, best=torch.tensor([5])) == [33]
    drawn = [Request(Allowing({33, 40}), SamplingParams(temperature=1.0, seed=n), seed=n) for n in range(40)]
    assert set(sample(logits.expand(40, -1), *drawn)) == {33, 40}


def test_a_bias_cannot_bring_back_what_is_not_allowed() -> None:
    request = Request(Allowing({33, 40}), SamplingParams(logit_bias={5: 100.0, 40: 1.0}))
    assert sample(torch.zeros(1, VOCAB), request) == [40]


def test_sampling_again_changes_nothing() -> None:
    request = Request(Allowing({3}, {4, 5}, {6}))
    for expected in (3, 4, 6):
        assert [sample(torch.zeros(1, VOCAB), request) for _ in range(3)] == [[expected]] * 3
        request.output_ids.append(expected)
    assert request.constraint is not None
    assert request.constraint.taken == [3, 4]


def test_a_constraint_that_fails_ends_its_request_alone() -> None:
    front = scripted_front({(5,): [20, 21, 2], (6,): [20, 21, 2]})
    good, bad = front.add([5], SamplingParams()), front.add([6], SamplingParams())
    bad.choices[0].request.constraint = Failing({3}, None)
    while front.has_unfinished:
        front.step()
    assert good.choices[0].request.output_ids == [20, 21, 2]
    assert bad.choices[0].request.finish_reason is FinishReason.ERROR
    assert "not allowed; found 20" in str(bad.choices[0].request.error)
    front.engine.check_integrity()
