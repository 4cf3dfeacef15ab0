"""RMSNorm on the GPU: real and odd rows, each defect further away than the roundings; rows alone and in a batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hemiola.kernels.rms_norm import rms_norm
from hemiola.ops.rms_norm import rms_norm as reference
from tests.support.numerics import generator, randn
from tests.support.separation import assert_separates, poisoned_allocations

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

EPS = 1e-5


def inputs(num_tokens: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    g = generator(num_tokens)
    x, residual = randn(g, 2, num_tokens, hidden + 8, dtype=torch.bfloat16).cuda()[:, :, :hidden]
    return x, residual, (1 + 0.3 * randn(g, hidden)).bfloat16().cuda()


@pytest.mark.parametrize(
    ("num_tokens", "hidden"), [(1, 2688), (64, 2688), (8192, 2688), (256, 4096), (33, 256), (7, 100)]
)
@pytest.mark.parametrize("has_residual", [True, False])
def test_parity(num_tokens: int, hidden: int, has_residual: bool) -> None:
    x, other, weight = inputs(num_tokens, hidden)
    residual = other if has_residual else None
    with poisoned_allocations():
        y, total = rms_norm(x, residual, weight, EPS)
    expected, expected_total = reference(x, residual, weight, EPS)
    assert torch.equal(total, expected_total)

    def exact(total: Tensor, weight: Tensor = weight) -> Tensor:
        wide = total.double()
        return (wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()).reshape(-1, 1)

    assert_separates(
        f"y {num_tokens} x {hidden}",
        y.reshape(-1, 1),
        expected.reshape(-1, 1),
        exact(total),
        {
            "no weight": exact(total, torch.ones_like(weight)),
            "another residual": exact(x if has_residual else x + other),
            "the weight of a neighbour": exact(total, weight.roll(1)),
        },
    )


@pytest.mark.parametrize("num_tokens", [1, 64, 1024])
def test_codes(num_tokens: int) -> None:
    x, residual, weight = inputs(num_tokens, 2688)
    with poisoned_allocations():
        codes, _ = rms_norm(x, residual, weight, EPS, 0.0131)
    y, _ = rms_norm(x, residual, weight, EPS)
    expected = (y.float() / torch.tensor(0.0131, device="cuda")).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    assert codes.float().abs().max() <= 448
    saturated, _ = rms_norm(x, residual, weight, EPS, 1e-5)
    assert saturated.float().abs().max() == 448


def test_neighbours_change_no_bit() -> None:
    x, residual, weight = inputs(300, 2688)
    whole = rms_norm(x, residual, weight, EPS)
    for low, high in ((0, 1), (17, 18), (40, 104), (172, 300)):
        alone = rms_norm(x[low:high], residual[low:high], weight, EPS)
        assert all(torch.equal(a, b[low:high]) for a, b in zip(alone, whole, strict=True))
