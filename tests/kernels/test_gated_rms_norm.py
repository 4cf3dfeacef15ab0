"""Gated group norm kernel in the interpreter: groups, roundings, a gate that is a slice of in_proj's output."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hemiola.kernels.gated_rms_norm import gated_rms_norm
from hemiola.ops.gated_rms_norm import gated_rms_norm as reference
from tests.support.numerics import assert_ledger, bf16, generator, randn
from tests.support.separation import poisoned_allocations

EPS = 1e-5


@pytest.mark.parametrize(("groups", "group_size"), [(1, 64), (2, 40), (8, 16), (3, 1), (2, 640)])
@pytest.mark.parametrize("out_scale", [None, 0.013])
def test_equals_the_reference(groups: int, group_size: int, out_scale: float | None) -> None:
    g = generator(groups)
    width = groups * group_size
    y, weight = randn(g, 3, width, dtype=torch.bfloat16), randn(g, width, dtype=torch.bfloat16)
    z = randn(g, 3, width + 40, dtype=torch.bfloat16)[:, :width] * 2
    with poisoned_allocations():
        out = gated_rms_norm(y, z, weight, group_size, EPS, out_scale)
    expected = reference(y, z, weight, group_size, EPS, out_scale)
    assert out.dtype == expected.dtype
    share = (out.view(torch.uint8) != expected.view(torch.uint8)).float().mean()
    assert share <= 0.01, "more than another order of summation explains"


def test_roundings_and_groups() -> None:
    """B5: the mean is the group's, and the gate comes first."""
    g = generator(0)
    y, z, weight = (randn(g, *shape, dtype=torch.bfloat16) for shape in ((6, 256), (6, 256), (256,)))
    out = gated_rms_norm(y, z, weight, 64, EPS)

    def normalised(value: Tensor, group_size: int = 64) -> Tensor:
        by_group = value.view(6, -1, group_size)
        return (by_group / torch.sqrt(by_group.square().mean(-1, keepdim=True) + EPS)).view(6, -1)

    gate = z.double() * torch.sigmoid(z.double())
    gated = y.double() * gate
    assert_ledger(
        out,
        bf16(normalised(gated)) * weight.double(),
        {
            "the whole width": bf16(normalised(gated, 256)) * weight.double(),
            "the gate behind the norm": bf16(normalised(y.double()) * gate) * weight.double(),
            "no rounding before the weight": normalised(gated) * weight.double(),
            "a rounded gate": bf16(normalised(y.double() * bf16(gate))) * weight.double(),
        },
    )


def test_no_tokens() -> None:
    assert gated_rms_norm(torch.empty(0, 64), torch.empty(0, 64), torch.ones(64), 16, EPS).shape == (0, 64)
