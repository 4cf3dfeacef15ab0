"""Router kernels in the interpreter: logits of both kernels, the choice with and without groups, ties."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hemiola.kernels import router
from hemiola.ops.moe_route import choice as reference
from tests.support.numerics import assert_close, generator, randn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_tokens", "num_experts", "hidden"), [(1, 5, 48), (3, 64, 80), (9, 40, 272), (33, 5, 64)])
def test_logits(num_tokens: int, num_experts: int, hidden: int, dtype: torch.dtype) -> None:
    g = generator(num_tokens)
    wide = randn(g, num_tokens, hidden + 8, dtype=torch.bfloat16)
    x, gate = wide[:, 8:], randn(g, num_experts, hidden, dtype=dtype)
    expected = x.double() @ gate.double().T
    for invariant in (False, True):
        assert_close(router.router_logits(x, gate, invariant=invariant), expected, 1e-6)
    if dtype == torch.float32:
        rounded = x.double() @ gate.bfloat16().double().T
        assert (rounded - expected).abs().max() > 1e-4 * expected.abs().max()


def test_logits_of_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "MANY_TOKENS", 16)
    g = generator(70)
    x, gate = randn(g, 70, 144, dtype=torch.bfloat16), randn(g, 130, 144, dtype=torch.bfloat16)
    assert_close(router.router_logits(x, gate), x.double() @ gate.double().T, 1e-6)


def assert_same_choice(logits: Tensor, bias: Tensor, top_k: int, groups: int, taken: int, normalise: bool) -> Tensor:
    ids, weights = router.moe_route(logits, bias, top_k, groups, taken, normalise)
    expected_ids, expected_weights = reference(logits, bias, top_k, groups, taken, normalise)
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=0)
    return ids


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "groups", "taken"),
    [
        (128, 6, 1, 1),
        (512, 22, 1, 1),
        (8, 2, 4, 2),
        (24, 3, 3, 2),
        (20, 4, 4, 4),
        (6, 2, 6, 3),
        (6, 4, 6, 3),
        (5, 5, 1, 1),
    ],
)
def test_the_choice(num_experts: int, top_k: int, groups: int, taken: int, normalise: bool) -> None:
    g = generator(num_experts + groups)
    logits, bias = randn(g, 7, num_experts) * 2, randn(g, num_experts) * 0.3
    ids = assert_same_choice(logits, bias, top_k, groups, taken, normalise)
    assert not torch.equal(ids.long(), reference(logits, torch.zeros_like(bias), top_k, groups, taken, normalise)[0])
    if taken < groups < num_experts:
        assert not torch.equal(ids.long(), reference(logits, bias, top_k, 1, 1, normalise)[0])


@pytest.mark.parametrize(("groups", "taken"), [(1, 1), (4, 2)])
def test_ties_go_to_the_lower_id(groups: int, taken: int) -> None:
    g = generator(3)
    logits = torch.randint(-1, 2, (16, 16), generator=g).float()
    assert_same_choice(logits, torch.zeros(16), 6, groups, taken, True)
    assert_same_choice(torch.full((2, 16), 90.0), torch.zeros(16), 6, groups, taken, True)
    assert_same_choice(torch.full((2, 16), -110.0), torch.zeros(16), 6, groups, taken, True)


def test_ids_stay_in_range_where_logits_are_not_numbers() -> None:
    logits = torch.zeros(3, 12)
    logits[0, 4], logits[1, :8], logits[2] = torch.nan, torch.nan, torch.nan
    ids, _ = router.moe_route(logits, torch.zeros(12), 6, 1, 1, True)
    assert ids.min() >= 0
    assert ids.max() < 12


def test_logits_and_their_choice() -> None:
    """Where it is not one launch."""
    g = generator(6)
    x, gate, bias = randn(g, 9, 48, dtype=torch.bfloat16), randn(g, 16, 48, dtype=torch.bfloat16), randn(g, 16)
    ids, weights, logits = router.route(x, gate, bias, 3, 4, 2, True)
    assert torch.equal(logits, router.router_logits(x, gate))
    for result, expected in zip((ids, weights), router.moe_route(logits, bias, 3, 4, 2, True), strict=True):
        assert torch.equal(result, expected)
