"""RMSNorm kernel in the interpreter: the reference's roundings, on views, and the codes of a W8A8 product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hemiola.kernels.rms_norm import rms_norm
from hemiola.ops.rms_norm import rms_norm as reference
from tests.support.numerics import assert_ledger, bf16, generator, randn
from tests.support.separation import poisoned_allocations

EPS = 1e-5


def rows(g: torch.Generator, num_tokens: int, hidden: int) -> Tensor:
    """A slice of wider rows."""
    return randn(g, num_tokens, hidden + 24, dtype=torch.bfloat16)[:, 8 : 8 + hidden]


@pytest.mark.parametrize("hidden", [1, 40, 64, 672, 2688])
@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("out_scale", [None, 0.013])
def test_equals_the_reference(hidden: int, has_residual: bool, out_scale: float | None) -> None:
    g = generator(hidden)
    x, residual = rows(g, 3, hidden), rows(g, 3, hidden) if has_residual else None
    weight = randn(g, hidden, dtype=torch.bfloat16)
    with poisoned_allocations():
        y, total = rms_norm(x, residual, weight, EPS, out_scale)
    expected, expected_total = reference(x, residual, weight, EPS, out_scale)
    assert torch.equal(total, expected_total)
    assert y.dtype == expected.dtype
    share = (y.view(torch.uint8) != expected.view(torch.uint8)).float().mean()
    assert share <= 0.01, "more than another order of summation explains"


def test_roundings() -> None:
    g = generator(0)
    x, residual, weight = rows(g, 8, 256), rows(g, 8, 256), randn(g, 256, dtype=torch.bfloat16)
    y, _ = rms_norm(x, residual, weight, EPS)

    def normalised(total: Tensor) -> Tensor:
        return total / torch.sqrt(total.square().mean(-1, keepdim=True) + EPS)

    wide = x.double() + residual.double()
    assert_ledger(
        y,
        normalised(bf16(wide)) * weight.double(),
        {
            "the unrounded sum": normalised(wide) * weight.double(),
            "a rounding before the weight": bf16(normalised(bf16(wide))) * weight.double(),
        },
    )


def test_no_tokens() -> None:
    y, total = rms_norm(torch.empty(0, 64), torch.empty(0, 64), torch.ones(64), EPS)
    assert y.shape == total.shape == (0, 64)
