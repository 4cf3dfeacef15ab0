"""The norm and the router in one: what the two give one after the other."""

from __future__ import annotations

import pytest
import torch

from hemiola.ops.kept import KeptForms
from hemiola.ops.moe_route import moe_route
from hemiola.ops.norm_route import norm_route
from hemiola.ops.rms_norm import rms_norm
from tests.support.numerics import generator, randn
from tests.support.weights import plain_weight

EPS = 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_is_the_two_one_after_the_other(dtype: torch.dtype, has_residual: bool, num_tokens: int) -> None:
    g, kept = generator(num_tokens), KeptForms(1 << 30)
    x, other = randn(g, 2, num_tokens, 64, dtype=dtype)
    residual, weight = other if has_residual else None, randn(g, 64, dtype=dtype)
    router = (plain_weight("gate", randn(g, 8, 64)), torch.bfloat16, randn(g, 8), 3, 4, 2, True)
    y, total = rms_norm(x, residual, weight, EPS)
    expected = (*moe_route(y, *router, kept=kept), y, total)
    result = norm_route(x, residual, weight, EPS, *router, kept=kept)
    assert len(result) == 5
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    if num_tokens:
        assert not torch.equal(result[2], moe_route(x, *router, kept=kept)[2])
