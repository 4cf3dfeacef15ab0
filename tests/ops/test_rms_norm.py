"""The fused add and RMSNorm: values, and where it rounds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hemiola.ops.rms_norm import rms_norm
from tests.support.numerics import assert_close, assert_ledger, bf16, generator, randn, uniform

EPS = 1e-5


def inverse_rms(x: Tensor) -> Tensor:
    return torch.stack([1 / torch.sqrt(sum(v * v for v in row) / len(row) + EPS) for row in x])[:, None]


@pytest.mark.parametrize("hidden", [1, 63, 64, 193])
@pytest.mark.parametrize("num_tokens", [1, 17])
@pytest.mark.parametrize("with_residual", [True, False])
def test_float32_equals_float64(num_tokens: int, hidden: int, with_residual: bool) -> None:
    g = generator(hidden)
    x, weight = randn(g, num_tokens, hidden), uniform(g, 0.5, 1.5, hidden)
    residual = randn(g, num_tokens, hidden) if with_residual else None
    total = x.double() + (0 if residual is None else residual.double())
    y, new_residual = rms_norm(x, residual, weight, EPS)
    assert_close(new_residual, total, 1e-7)
    assert_close(y, total * inverse_rms(total) * weight.double(), 5e-7)


def test_epsilon_is_inside_the_root() -> None:
    x = torch.full((1, 8), 1e-3)
    expected = x.double() / (1e-6 + EPS) ** 0.5
    assert_close(rms_norm(x, None, torch.ones(8), EPS)[0], expected, 5e-7)
    assert rms_norm(torch.zeros(1, 8), None, torch.ones(8), EPS)[0].eq(0).all()


def test_bf16_ledger() -> None:
    """The sum is rounded once, to the new residual; the norm of that rounded sum is rounded after the weight."""
    g = generator(1)
    x, residual = randn(g, 64, 96, dtype=torch.bfloat16), randn(g, 64, 96, dtype=torch.bfloat16)
    weight = uniform(g, 0.5, 1.5, 96).bfloat16()
    total, w = x.double() + residual.double(), weight.double()
    rounded = bf16(total)
    y, new_residual = rms_norm(x, residual, weight, EPS)
    assert torch.equal(new_residual, total.float().bfloat16())
    assert_ledger(
        y,
        rounded * inverse_rms(rounded) * w,
        {
            "the norm of the unrounded sum": total * inverse_rms(total) * w,
            "a rounding before the weight": bf16(rounded * inverse_rms(rounded)) * w,
            "a rounded inverse": rounded * bf16(inverse_rms(rounded)) * w,
        },
    )


def test_the_first_layer_passes_its_input_on_as_the_residual() -> None:
    x = randn(generator(2), 5, 16, dtype=torch.bfloat16)
    assert torch.equal(rms_norm(x, None, torch.ones(16).bfloat16(), EPS)[1], x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_alone_equals_the_row_in_a_batch(dtype: torch.dtype) -> None:
    g = generator(3)
    x, residual, weight = randn(g, 9, 70, dtype=dtype), randn(g, 9, 70, dtype=dtype), randn(g, 70, dtype=dtype)
    together = rms_norm(x, residual, weight, EPS)
    for row in range(9):
        alone = rms_norm(x[row : row + 1], residual[row : row + 1], weight, EPS)
        assert all(torch.equal(a[0], t[row]) for a, t in zip(alone, together, strict=True))
