"""The plain linear layer and its unrounded form: values, the one rounding, and the kept conversions."""

from __future__ import annotations

import pytest
import torch

from hemiola.formats.weight import Weight
from hemiola.ops.kept import KeptForms
from hemiola.ops.linear import linear, linear_float32, linears
from tests.support.numerics import assert_close, assert_ledger, bf16, generator, integers, randn
from tests.support.weights import plain_weight


def store() -> KeptForms:
    return KeptForms(1 << 30)


def in_own_dtype(x: torch.Tensor, weight: Weight, *, kept: KeptForms) -> torch.Tensor:
    return linear(x, weight, x.dtype, kept=kept)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 53])
@pytest.mark.parametrize(("out_size", "in_size"), [(1, 1), (33, 17), (64, 96)])
def test_float32_equals_float64(num_tokens: int, out_size: int, in_size: int) -> None:
    g = generator(in_size)
    x, w = randn(g, num_tokens, in_size), randn(g, out_size, in_size)
    for op in (in_own_dtype, linear_float32):
        kept = store()
        assert_close(op(x, plain_weight("w", w), kept=kept), x.double() @ w.double().T, 1e-6)
        assert kept.kept_bytes == 0, "a float32 weight needs no conversion in a float32 run"


@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_bf16_accumulates_in_float32_and_rounds_once(num_tokens: int) -> None:
    """Whole numbers: every partial sum is exact in float32, so the result is the exact sum rounded once, to the bit."""
    g = generator(0)
    x = integers(g, -15, 15, num_tokens, 256, dtype=torch.bfloat16)
    w = integers(g, -15, 15, 128, 256, dtype=torch.bfloat16)
    exact = x.double() @ w.double().T
    result = linear(x, plain_weight("w", w), x.dtype, kept=store())
    assert torch.equal(result, exact.float().bfloat16())
    halves = bf16(x.double()[:, :128] @ w.double()[:, :128].T) + bf16(x.double()[:, 128:] @ w.double()[:, 128:].T)
    assert_ledger(result, exact, {"a rounded partial sum": halves})

    unrounded = linear_float32(x, plain_weight("w", w), kept=store())
    assert unrounded.dtype == torch.float32
    assert torch.equal(unrounded.double(), exact)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_a_bf16_run_rounds_a_wider_weight_to_bf16(stored: torch.dtype) -> None:
    g = generator(1)
    x, w = randn(g, 9, 64, dtype=torch.bfloat16), randn(g, 48, 64, dtype=stored)
    right, unrounded = x.double() @ bf16(w.double()).T, x.double() @ w.double().T
    assert_ledger(linear(x, plain_weight("w", w), x.dtype, kept=store()), right, {"an unrounded weight": unrounded})
    assert_close(linear_float32(x, plain_weight("w", w), kept=store()), right, 1e-6)


@pytest.mark.parametrize("op", [in_own_dtype, linear_float32])
def test_a_float32_run_widens_a_bf16_weight_once(op: object) -> None:
    g = generator(2)
    x, weight = randn(g, 3, 64), plain_weight("w", randn(g, 48, 64, dtype=torch.bfloat16))
    kept = store()
    assert callable(op)
    first = op(x, weight, kept=kept)
    assert_close(first, x.double() @ weight.data.double().T, 1e-6)
    assert kept.kept_bytes == 48 * 64 * 4
    assert torch.equal(op(x, weight, kept=kept), first)
    assert (kept.kept_bytes, kept.transient_builds) == (48 * 64 * 4, 0)


def test_a_row_alone_equals_the_row_in_a_batch() -> None:
    """bf16 to the bit. A float32 product of one row is another BLAS kernel, with another order of summation."""
    g = generator(3)
    w = randn(g, 40, 64)
    x = randn(g, 9, 64)
    for dtype in (torch.bfloat16, torch.float32):
        weight = plain_weight("w", w.to(dtype))
        together = linear(x.to(dtype), weight, x.to(dtype).dtype, kept=store())
        for row in range(9):
            alone = linear(x[row : row + 1].to(dtype), weight, x[row : row + 1].to(dtype).dtype, kept=store())[0]
            if dtype == torch.bfloat16:
                assert torch.equal(alone, together[row])
            else:
                assert_close(alone, together[row], 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_several_of_one_input_are_each_alone(dtype: torch.dtype) -> None:
    g, kept = generator(4), store()
    x = randn(g, 5, 24, dtype=dtype)
    weights = [plain_weight(name, randn(g, size, 24)) for name, size in (("q", 40), ("k", 8), ("v", 8))]
    results = linears(x, tuple(weights), dtype, kept=kept)
    assert len(results) == 3
    for result, weight in zip(results, weights, strict=True):
        assert torch.equal(result, linear(x, weight, dtype, kept=kept))
