"""Bounds that a test derives itself: between what rounding costs, as the reference shows, and what a defect costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

GAP = 8.0  # least ratio of the mildest defect to the reference's own error


def vector_error(result: Tensor, exact: Tensor) -> float:
    """Largest distance of two vectors (last dimension), in units of the exact ones' RMS length over the first
    dimension; NaN counts as infinitely far."""
    assert result.shape == exact.shape, f"{tuple(result.shape)} against {tuple(exact.shape)}"
    length = exact.double().norm(dim=-1).square().mean(0, keepdim=True).sqrt().clamp(min=1e-300)
    distance = (result.double() - exact.double()).norm(dim=-1) / length
    return float(torch.nan_to_num(distance, nan=torch.inf).max())


def assert_separates(
    name: str, result: Tensor, reference: Tensor, exact: Tensor, defects: Mapping[str, Tensor]
) -> None:
    """The result is as near to the exact values as the reference's roundings explain, and no defect is.

    The bound is the geometric mean of the reference's error and the mildest defect's, which have to lie GAP apart.
    """
    error, floor = vector_error(result, exact), vector_error(reference, exact)
    wrong = {defect: vector_error(value, exact) for defect, value in defects.items()}
    mildest = min(wrong.values())
    bound = (max(floor, mildest / GAP**4) * mildest) ** 0.5
    listing = ", ".join(f"{defect} {value:.1e}" for defect, value in wrong.items())
    print(f"{name}: error {error:.1e}, reference {floor:.1e}, bound {bound:.1e}; {listing}")
    assert mildest >= GAP * floor, f"{name}: rounding hides a defect"
    assert error <= bound, f"{name}: error {error:.3g} above {bound:.3g}"


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Inside, torch.empty gives NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
