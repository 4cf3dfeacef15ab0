"""The router: what the gate is rounded to; brute force over groups, ties, the bias that only selects, many experts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hemiola.ops.kept import KeptForms
from hemiola.ops.moe_route import choice, moe_route, router_logits
from tests.support.numerics import assert_close, bf16, generator, randn, relative_error
from tests.support.weights import plain_weight


def brute_force(
    logits: list[float], bias: list[float], top_k: int, groups: int, topk_groups: int, normalise: bool
) -> tuple[list[int], list[float]]:
    """float64, plain lists."""
    scores = [1 / (1 + math.exp(-v)) for v in logits]
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(logits) // groups
    worth = [sum(sorted(biased[i * size : (i + 1) * size])[-2:]) for i in range(groups)]
    allowed = sorted(range(groups), key=lambda i: (-worth[i], i))[:topk_groups]
    candidates = [e for e in range(len(logits)) if e // size in allowed]
    ids = sorted(candidates, key=lambda e: (-biased[e], e))[:top_k]
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
    ids, weights = choice(logits, bias, top_k, groups, topk_groups, normalise)
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
    ids, _ = choice(torch.zeros(1, num_experts), torch.tensor(bias), top_k, groups, topk_groups, True)
    assert ids[0].tolist() == brute_force([0.0] * num_experts, bias, top_k, groups, topk_groups, True)[0]


def test_the_group_stage_bites() -> None:
    """The best expert's group loses to one with two good experts, and its expert is not taken."""
    logits = torch.tensor([[3.0, -3.0, 1.5, 1.5]])
    bias = torch.zeros(4)
    assert choice(logits, bias, 2, 2, 1, True)[0].tolist() == [[2, 3]]
    assert choice(logits, bias, 2, 2, 2, True)[0].tolist() == [[0, 2]]
    # A negative bias everywhere must not let a dropped group back in.
    assert choice(logits, bias - 5, 2, 2, 1, True)[0].tolist() == [[2, 3]]


@pytest.mark.parametrize("topk_groups", [1, 2])
def test_a_bias_near_64_keeps_its_small_steps(topk_groups: int) -> None:
    """B6: bias 64 + steps of 1/64, 1,000 rows: ids as in float32, the bias not in the weights."""
    num_experts, top_k = 16, 4
    g = generator(6)
    bias = 64 + torch.randperm(num_experts, generator=g).float() / 64
    logits = randn(g, 1000, num_experts) * 0.05
    ids, weights = choice(logits, bias, top_k, 2, topk_groups, False)

    scores = torch.sigmoid(logits)
    biased = (scores + bias).view(1000, 2, 8)
    if topk_groups == 1:
        best_group = biased.sort(2).values[..., -2:].sum(2).sort(dim=1, descending=True, stable=True).indices[:, 0]
        biased[torch.arange(1000), 1 - best_group] = -math.inf
    expected = biased.flatten(1).sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    assert torch.equal(ids, expected)
    assert torch.equal(weights, scores.gather(1, ids))

    in_bf16 = (scores.bfloat16() + bias.bfloat16()).sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    assert (in_bf16.sort(1).values != expected.sort(1).values).any(1).float().mean() > 0.5, "bf16 would show"


def test_scores_that_vanish_give_no_weight_instead_of_nan() -> None:
    """The weight sum starts at 1e-20, as in the fused kernel that this family is served with."""
    for logit in (-20.0, -40.0, -60.0, -200.0):
        weight = math.exp(logit) / (2 * math.exp(logit) + 1e-20)
        _, weights = choice(torch.full((1, 4), logit), torch.zeros(4), 2, 1, 1, True)
        assert weights[0].tolist() == pytest.approx([weight] * 2, rel=1e-5, abs=1e-30)


def test_a_row_alone_equals_the_row_in_a_batch() -> None:
    g = generator(7)
    logits, bias = randn(g, 9, 16), randn(g, 16)
    ids, weights = choice(logits, bias, 3, 4, 2, True)
    for row in range(9):
        alone_ids, alone_weights = choice(logits[row : row + 1], bias, 3, 4, 2, True)
        assert torch.equal(alone_ids[0], ids[row])
        # torch's vectorised sigmoid and its scalar one, which takes what is left of a row, differ in the last bit.
        assert_close(alone_weights[0], weights[row], 2e-7)


@pytest.mark.parametrize("num_tokens", [1, 15, 17])
@pytest.mark.parametrize("activations", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16])
def test_float32_result_with_the_gate_rounded_as_asked(
    num_tokens: int, activations: torch.dtype, stored: torch.dtype, gate_dtype: torch.dtype
) -> None:
    g = generator(num_tokens)
    x, gate = randn(g, num_tokens, 65, dtype=activations), randn(g, 9, 65, dtype=stored)
    kept = KeptForms(1 << 30)
    result = router_logits(x, plain_weight("gate", gate), gate_dtype, kept=kept)
    rounded, exact = (x.double() @ w.T for w in (bf16(gate.double()), gate.double()))
    right, wrong = (rounded, exact) if gate_dtype == torch.bfloat16 else (exact, rounded)
    assert result.dtype == torch.float32
    assert_close(result, right, 1e-6)
    if stored == torch.float32:
        assert relative_error(result, wrong) > 1e-4
    assert relative_error(bf16(result.double()), right) > 1e-5, "logits rounded to bf16 would show"
    converted = gate_dtype == torch.bfloat16 or stored == torch.bfloat16
    assert kept.kept_bytes == (9 * 65 * 4 if converted else 0)


def test_the_two_roundings_of_one_gate_are_kept_apart() -> None:
    g, kept = generator(0), KeptForms(1 << 30)
    x, gate = randn(g, 4, 32), plain_weight("gate", randn(g, 8, 32, dtype=torch.float16))
    for _ in range(2):
        for dtype, weight in ((torch.float32, gate.data.double()), (torch.bfloat16, bf16(gate.data.double()))):
            assert_close(router_logits(x, gate, dtype, kept=kept), x.double() @ weight.T, 1e-6)
    assert kept.kept_bytes == 2 * 8 * 32 * 4


def test_logits_of_a_row_alone_equal_those_of_the_row_in_a_batch() -> None:
    g, kept = generator(1), KeptForms(1 << 30)
    gate = plain_weight("gate", torch.randint(-8, 9, (8, 32), generator=g).float())
    x = torch.randint(-8, 9, (9, 32), generator=g).float()  # exact sums
    together = router_logits(x, gate, torch.float32, kept=kept)
    for row in range(9):
        assert torch.equal(router_logits(x[row : row + 1], gate, torch.float32, kept=kept)[0], together[row])


def test_the_choice_is_of_the_logits() -> None:
    g, kept = generator(2), KeptForms(1 << 30)
    x, gate, bias = randn(g, 7, 32), plain_weight("gate", randn(g, 16, 32)), randn(g, 16)
    ids, weights, logits = moe_route(x, gate, torch.bfloat16, bias, 3, 4, 2, True, kept=kept)
    assert torch.equal(logits, router_logits(x, gate, torch.bfloat16, kept=kept))
    for result, expected in zip((ids, weights), choice(logits, bias, 3, 4, 2, True), strict=True):
        assert torch.equal(result, expected)
