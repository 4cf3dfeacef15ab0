"""The experts and the next layer's norm in one: what the two give one after the other."""

from __future__ import annotations

import pytest
import torch

from hemiola.formats.weight import ExpertBank, Scheme, SharedExpert
from hemiola.ops.experts_norm import experts_norm
from hemiola.ops.kept import KeptForms
from hemiola.ops.moe_experts import moe_experts
from hemiola.ops.rms_norm import rms_norm
from tests.support.numerics import generator, randn, uniform
from tests.support.weights import SCHEMES, random_weight

NUM_EXPERTS, TOP_K, HIDDEN, INTER = 5, 2, 64, 32
EPS = 1e-5


@pytest.mark.parametrize("scheme", SCHEMES, ids=[s.value for s in SCHEMES])
@pytest.mark.parametrize("has_shared", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_is_the_two_one_after_the_other(dtype: torch.dtype, has_shared: bool, scheme: Scheme, num_tokens: int) -> None:
    g, kept = generator(num_tokens), KeptForms(1 << 30)

    def bank(name: str, out_size: int, in_size: int) -> ExpertBank:
        return ExpertBank(
            name, tuple(random_weight(g, f"{name}.{e}", scheme, out_size, in_size) for e in range(NUM_EXPERTS))
        )

    shared = SharedExpert(
        random_weight(g, "shared.up", scheme, INTER, HIDDEN), random_weight(g, "shared.down", scheme, HIDDEN, INTER)
    )
    x, residual = randn(g, 2, num_tokens, HIDDEN, dtype=dtype)
    ids = torch.stack([torch.randperm(NUM_EXPERTS, generator=g)[:TOP_K] for _ in range(num_tokens)])
    weights, norm_weight = uniform(g, 0.1, 1.0, num_tokens, TOP_K), randn(g, HIDDEN, dtype=dtype)
    up, down = bank("up", INTER, HIDDEN), bank("down", HIDDEN, INTER)
    experts = (x, ids, weights, up, down, 2.5, shared if has_shared else None)
    output = moe_experts(*experts, kept=kept)
    for out_scale in (None, 0.011):
        y, total = experts_norm(experts, residual, norm_weight, EPS, out_scale, kept=kept)
        expected, expected_total = rms_norm(output, residual, norm_weight, EPS, out_scale)
        assert y.dtype == expected.dtype
        assert torch.equal(y.float(), expected.float())
        assert torch.equal(total, expected_total)
    assert not torch.equal(total, output)
