"""The router: brute force over groups, ties, the bias that only selects, many experts per token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hemiola.ops.moe_route import moe_route
from tests.support.numerics import assert_close, generator, randn


def brute_force(
    logits: list[float], bias: list[float], top_k: int, groups: int, topk_groups: int, normalise: bool
) -> tuple[list[int], list[float]]:
    """float64, plain lists."""
    scores = [1 / (1 + math.exp(-v)) for v in logits]
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(logits) // groups
    worth = [sum(sorted(choice[i * size : (i + 1) * size])[-2:]) for i in range(groups)]
    allowed = sorted(range(groups), key=lambda i: (-worth[i], i))[:topk_groups]
    candidates = [e for e in range(len(logits)) if e // size in allowed]
    ids = sorted(candidates, key=lambda e: (-choice[e], e))[:top_k]
    weights = [scores[e] for e in ids]
    return ids, [w / sum(weights) for w in weights] if normalise else weights


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "groups", "topk_groups"),
    [
        (8, 2, 1, 1),
        (8, 2, 4, 2),
        (16, 6, 4, 3),
        (32, 22, 1, 1),
        (8, 2, 8, 2),
        (8, 8, 1, 1),
        (8, 4, 2, 1),
        (512, 22, 1, 1),
    ],
)
def test_equals_brute_force(num_experts: int, top_k: int, groups: int, topk_groups: int, normalise: bool) -> None:
    g = generator(num_experts)
    logits, bias = randn(g, 40, num_experts), randn(g, num_experts) * 0.3
    ids, weights = moe_route(logits, bias, top_k, groups, topk_groups, normalise)
    assert ids.dtype == torch.int64
    assert weights.dtype == torch.float32
    expected = [brute_force(row, bias.tolist(), top_k, groups, topk_groups, normalise) for row in logits.tolist()]
    assert ids.tolist() == [e[0] for e in expected]
    assert_close(weights, torch.tensor([e[1] for e in expected]), 5e-7)


@given(
    st.data(),
    st.sampled_from([(8, 3, 1, 1), (8, 2, 4, 2), (8, 4, 2, 1), (12, 3, 4, 1), (6, 2, 6, 3)]),
)
@settings(deadline=None, max_examples=60)
def test_ties_go_to_the_lower_group_and_the_lower_id(data: st.DataObject, sizes: tuple[int, int, int, int]) -> None:
    """Logits of one value only, bias values from a coarse grid: choices tie exactly, in float32 and float64."""
    num_experts, top_k, groups, topk_groups = sizes
    bias = data.draw(st.lists(st.sampled_from([0.0, 0.25, 0.5]), min_size=num_experts, max_size=num_experts))
    ids, _ = moe_route(torch.zeros(1, num_experts), torch.tensor(bias), top_k, groups, topk_groups, True)
    assert ids[0].tolist() == brute_force([0.0] * num_experts, bias, top_k, groups, topk_groups, True)[0]


def test_the_group_stage_bites() -> None:
    """The best expert's group loses to one with two good experts, and its expert is not taken."""
    logits = torch.tensor([[3.0, -3.0, 1.5, 1.5]])
    bias = torch.zeros(4)
    assert moe_route(logits, bias, 2, 2, 1, True)[0].tolist() == [[2, 3]]
    assert moe_route(logits, bias, 2, 2, 2, True)[0].tolist() == [[0, 2]]
    # A negative bias everywhere must not let a dropped group back in.
    assert moe_route(logits, bias - 5, 2, 2, 1, True)[0].tolist() == [[2, 3]]


@pytest.mark.parametrize("topk_groups", [1, 2])
def test_a_bias_near_64_keeps_its_small_steps(topk_groups: int) -> None:
    """B6: bias 64 + steps of 1/64, 1,000 rows: ids as in float32, the bias not in the weights."""
    num_experts, top_k = 16, 4
    g = generator(6)
    bias = 64 + torch.randperm(num_experts, generator=g).float() / 64
    logits = randn(g, 1000, num_experts) * 0.05
    ids, weights = moe_route(logits, bias, top_k, 2, topk_groups, False)

    scores = torch.sigmoid(logits)
    choice = (scores + bias).view(1000, 2, 8)
    if topk_groups == 1:
        best_group = choice.sort(2).values[..., -2:].sum(2).sort(dim=1, descending=True, stable=True).indices[:, 0]
        choice[torch.arange(1000), 1 - best_group] = -math.inf
    expected = choice.flatten(1).sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    assert torch.equal(ids, expected)
    assert torch.equal(weights, scores.gather(1, ids))

    in_bf16 = (scores.bfloat16() + bias.bfloat16()).sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    assert (in_bf16.sort(1).values != expected.sort(1).values).any(1).float().mean() > 0.5, "bf16 would show"


def test_scores_that_vanish_give_no_weight_instead_of_nan() -> None:
    """The weight sum starts at 1e-20, as in the fused kernel that this family is served with."""
    for logit in (-20.0, -40.0, -60.0, -200.0):
        weight = math.exp(logit) / (2 * math.exp(logit) + 1e-20)
        _, weights = moe_route(torch.full((1, 4), logit), torch.zeros(4), 2, 1, 1, True)
        assert weights[0].tolist() == pytest.approx([weight] * 2, rel=1e-5, abs=1e-30)


def test_a_row_alone_equals_the_row_in_a_batch() -> None:
    g = generator(7)
    logits, bias = randn(g, 9, 16), randn(g, 16)
    ids, weights = moe_route(logits, bias, 3, 4, 2, True)
    for row in range(9):
        alone_ids, alone_weights = moe_route(logits[row : row + 1], bias, 3, 4, 2, True)
        assert torch.equal(alone_ids[0], ids[row])
        # torch's vectorised sigmoid and its scalar one, which takes what is left of a row, differ in the last bit.
        assert_close(alone_weights[0], weights[row], 2e-7)
