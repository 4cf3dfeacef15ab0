"""Exact rounding and how tests compare with it.

An op's rounding ledger is pinned by computing the op independently, in float64 with every rounding written out, and
then again with one rounding left out, moved or added: the first must match, each of the others must not.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

MATCHES = 0.01  # share of elements in which another order of float32 summation may flip a bf16 rounding
DIFFERS = 0.04  # least share of elements that a wrong ledger must change

INF = float("inf")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(g: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=g).to(dtype)


def uniform(g: torch.Generator, low: float, high: float, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=g) * (high - low) + low


def integers(g: torch.Generator, low: int, high: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Whole numbers in [low, high]: products and sums of them are exact in any order."""
    return torch.randint(low, high + 1, shape, generator=g).to(dtype)


def bf16(value: Tensor) -> Tensor:
    """A float64 value as a float32 register stored to bfloat16 would hold it; float64 again."""
    return value.float().bfloat16().double()


def ulps(a: Tensor, b: Tensor) -> Tensor:
    """Distance of two bfloat16 tensors in representable steps; both zeros are the same."""
    assert a.dtype == b.dtype == torch.bfloat16, "ulps are counted between bfloat16 tensors"
    assert not a.isnan().any(), "the result holds NaN"
    steps = [torch.where(i < 0, -(i & 0x7FFF), i) for i in (t.contiguous().view(torch.int16).int() for t in (a, b))]
    return (steps[0] - steps[1]).abs()


def assert_ledger(result: Tensor, right: Tensor, wrong: Mapping[str, Tensor], differs: float = DIFFERS) -> None:
    """result: bfloat16, from the op. right, wrong: float64, from ledgers written out (rounded to bf16 at the end)."""
    distance = ulps(result, right.float().bfloat16())
    assert distance.max() <= 1, f"off by {distance.max()} bf16 steps"
    share = (distance > 0).double().mean()
    assert share <= MATCHES, f"{share:.2%} of the elements differ from the ledger"
    for name, other in wrong.items():
        share = (ulps(result, other.float().bfloat16()) > 0).double().mean()
        assert share >= differs, f"a ledger with {name} differs in {share:.2%} only: this test does not pin it"


def assert_close(result: Tensor, expected: Tensor, relative: float) -> None:
    """Largest difference, relative to the largest expected magnitude."""
    assert result.shape == expected.shape, f"{tuple(result.shape)} against {tuple(expected.shape)}"
    error = relative_error(result, expected)
    assert error <= relative, f"relative error {error:.3g} above {relative:.3g}"


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected magnitude; NaN counts as infinitely far."""
    difference = (result.double() - expected.double()).abs()
    return float(torch.nan_to_num(difference, nan=INF).max() / expected.double().abs().max().clamp(min=1e-300))
