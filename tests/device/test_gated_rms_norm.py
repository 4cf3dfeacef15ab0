"""Gated group norm on the GPU: real and odd groups, each defect further away than the roundings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hemiola.kernels.gated_rms_norm import gated_rms_norm
from hemiola.ops.gated_rms_norm import gated_rms_norm as reference
from tests.support.numerics import generator, randn
from tests.support.separation import assert_separates, poisoned_allocations

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

EPS = 1e-5


def inputs(num_tokens: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Groups of very different size, so that a wrong mean shows."""
    g = generator(num_tokens)
    y = randn(g, num_tokens, width) * torch.linspace(0.2, 3, width)
    z = randn(g, num_tokens, width + 6208, dtype=torch.bfloat16)[:, :width]
    weight = 1 + 0.3 * randn(g, width)
    return y.bfloat16().cuda(), z.cuda(), weight.bfloat16().cuda()


@pytest.mark.parametrize(
    ("num_tokens", "groups", "group_size"),
    [(1, 8, 512), (64, 8, 512), (4096, 8, 512), (65, 8, 1280), (33, 2, 64), (7, 3, 100)],
)
def test_parity(num_tokens: int, groups: int, group_size: int) -> None:
    y, z, weight = inputs(num_tokens, groups * group_size)
    with poisoned_allocations():
        out = gated_rms_norm(y, z, weight, group_size, EPS)

    def normalised(value: Tensor, size: int = group_size) -> Tensor:
        by_group = value.view(num_tokens, -1, size)
        return (by_group / torch.sqrt(by_group.square().mean(-1, keepdim=True) + EPS)).view(num_tokens, -1)

    wide, gate = y.double(), z.double() * torch.sigmoid(z.double())
    exact = normalised(wide * gate) * weight.double()
    wrong = {
        "the whole width": normalised(wide * gate, groups * group_size) * weight.double(),
        "the gate behind the norm": normalised(wide) * gate * weight.double(),
        "no weight": normalised(wide * gate),
        "the next group's weight": normalised(wide * gate) * weight.double().roll(group_size),
        "sigmoid for silu": normalised(wide * torch.sigmoid(z.double())) * weight.double(),
    }
    assert_separates(
        f"{num_tokens} x {groups} x {group_size}",
        out.reshape(-1, 1),
        reference(y, z, weight, group_size, EPS).reshape(-1, 1),
        exact.reshape(-1, 1),
        {name: value.reshape(-1, 1) for name, value in wrong.items()},
    )


def test_codes() -> None:
    y, z, weight = inputs(64, 4096)
    with poisoned_allocations():
        codes = gated_rms_norm(y, z, weight, 512, EPS, 0.0131)
    out = gated_rms_norm(y, z, weight, 512, EPS)
    expected = (out.float() / torch.tensor(0.0131, device="cuda")).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    assert gated_rms_norm(y, z, weight, 512, EPS, 1e-5).float().abs().max() == 448


def test_neighbours_change_no_bit() -> None:
    y, z, weight = inputs(300, 4096)
    whole = gated_rms_norm(y, z, weight, 512, EPS)
    for low, high in ((0, 1), (17, 18), (40, 104), (172, 300)):
        assert torch.equal(gated_rms_norm(y[low:high], z[low:high], weight, 512, EPS), whole[low:high])
