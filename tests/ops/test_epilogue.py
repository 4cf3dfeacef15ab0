"""Squared ReLU: values, and one rounding."""

from __future__ import annotations

import torch

from hemiola.ops.epilogue import relu_squared
from tests.support.numerics import generator, randn


def test_every_bf16_value() -> None:
    """All 65,536 bit patterns but NaN: exactly max(x, 0) squared, rounded once."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[~x.isnan()]
    expected = (x.double().clamp(min=0) ** 2).float().bfloat16()
    assert torch.equal(relu_squared(x), expected)
    assert relu_squared(torch.tensor([float("nan")])).isnan().all()


def test_float32_equals_float64() -> None:
    x = randn(generator(0), 7, 33) * 5
    assert torch.equal(relu_squared(x), (x.double().clamp(min=0) ** 2).float())
    assert relu_squared(-x.abs()).eq(0).all()
