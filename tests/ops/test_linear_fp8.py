"""W8A8: the activation is really quantised by input_scale, and the epilogue is right, in every numeric mode."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hemiola.formats.weight import Scheme, Weight
from hemiola.ops.kept import KeptForms
from hemiola.ops.linear_fp8 import linear_fp8, linear_fp8_float32
from tests.support.numerics import assert_close, assert_ledger, bf16, generator, randn, relative_error
from tests.support.weights import e4m3_nearest, product, random_weight, unscaled, values

BOUND = 1e-6


def store() -> KeptForms:
    return KeptForms(1 << 30)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 53])
@pytest.mark.parametrize(("out_size", "in_size"), [(1, 1), (33, 17), (64, 96)])
def test_float32_equals_float64_with_quantised_activations(num_tokens: int, out_size: int, in_size: int) -> None:
    g = generator(out_size)
    x, weight = randn(g, num_tokens, in_size), random_weight(g, "w", Scheme.FP8, out_size, in_size)
    expected = product(x.double(), weight)
    assert_close(linear_fp8(x, weight, x.dtype, kept=store()), expected, BOUND)
    assert_close(linear_fp8_float32(x, weight, kept=store()), expected, BOUND)


def test_the_bound_sees_every_way_to_get_the_scales_wrong() -> None:
    g = generator(1)
    x, weight = randn(g, 16, 64), random_weight(g, "w", Scheme.FP8, 48, 64)
    scale, input_scale = weight.scale, weight.input_scale
    assert scale is not None
    assert input_scale is not None
    result, codes = linear_fp8(x, weight, x.dtype, kept=store()), unscaled(weight)
    quantised = e4m3_nearest(x.double() / input_scale)
    wrong = {
        "the activation left unquantised": x.double() @ values(weight).T,
        "the activation quantised without its scale": e4m3_nearest(x.double()) @ values(weight).T,
        "the activation multiplied by its scale": e4m3_nearest(x.double() * input_scale) @ values(weight).T,
        "no weight scale": quantised @ codes.T * input_scale,
        "no input scale in the epilogue": quantised @ codes.T * scale,
        "the input scale twice": quantised @ codes.T * scale * input_scale**2,
        "the weight scale divided by": quantised @ codes.T * input_scale / scale,
    }
    assert_close(result, quantised @ codes.T * scale * input_scale, BOUND)
    for name, other in wrong.items():
        assert relative_error(result, other) > 1000 * BOUND, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_saturate_at_448_steps(dtype: torch.dtype) -> None:
    g = generator(2)
    weight = dataclasses.replace(random_weight(g, "w", Scheme.FP8, 8, 4), input_scale=2.0**-6)
    limit = torch.full((1, 4), 7.0, dtype=dtype)  # 448 * 2**-6
    at_limit = linear_fp8(limit, weight, limit.dtype, kept=store())
    for factor in (1.03, 1.1, 2.0, 1e30):
        beyond = (limit.float() * factor).to(dtype)
        assert torch.equal(linear_fp8(beyond, weight, beyond.dtype, kept=store()), at_limit)
        assert torch.equal(linear_fp8(-beyond, weight, beyond.dtype, kept=store()), -at_limit)
    assert not torch.equal(linear_fp8(limit * 0.9, weight, limit.dtype, kept=store()), at_limit)


def test_activations_round_half_to_even() -> None:
    """Through an identity weight: 17 and 19 lie half-way between the e4m3 values 16, 18 and 20."""
    weight = Weight("w", (6, 6), Scheme.FP8, torch.eye(6).to(torch.float8_e4m3fn), None, 1.0, 0.5)
    x = torch.tensor([[17.0, 19.0, -17.0, 2.0**-10, 3 * 2.0**-10, 1.0]]) * 0.5
    expected = torch.tensor([[16.0, 20.0, -16.0, 0.0, 2.0**-8, 1.0]]) * 0.5
    assert torch.equal(linear_fp8(x, weight, x.dtype, kept=store()), expected)


def test_bf16_ledger() -> None:
    """The accumulator is scaled unrounded and rounded once."""
    g = generator(3)
    x, weight = randn(g, 32, 64, dtype=torch.bfloat16), random_weight(g, "w", Scheme.FP8, 64, 64)
    scale, input_scale = weight.scale, weight.input_scale
    assert scale is not None
    assert input_scale is not None
    right = product(x.double(), weight)
    result = linear_fp8(x, weight, x.dtype, kept=store())
    unscaled_sum = right / (scale * input_scale)
    assert_ledger(
        result,
        right,
        {
            "a rounding before the scales": bf16(unscaled_sum) * (scale * input_scale),
            "a rounding between the scales": bf16(unscaled_sum * scale) * input_scale,
            "an unquantised activation": x.double() @ values(weight).T,
            "a weight dequantised to bf16": x.double() @ bf16(values(weight)).T,
        },
    )
    assert torch.equal(linear_fp8_float32(x, weight, kept=store()).bfloat16(), result)


def test_codes_are_expanded_once() -> None:
    g, kept = generator(4), store()
    x, weight = randn(g, 2, 32), random_weight(g, "w", Scheme.FP8, 16, 32)
    first = linear_fp8(x, weight, x.dtype, kept=kept)
    assert torch.equal(linear_fp8(x, weight, x.dtype, kept=kept), first)
    linear_fp8(x.bfloat16(), weight, x.bfloat16().dtype, kept=kept)
    assert (kept.kept_bytes, kept.transient_builds) == (16 * 32 * 4, 0)


def test_unfused_projections_keep_their_own_scales() -> None:
    """B16: q, k and v with weight scales 0.5, 1 and 4 and input scales of their own."""
    g = generator(5)
    x = randn(g, 7, 64)
    parts = [
        dataclasses.replace(random_weight(g, name, Scheme.FP8, 16, 64), scale=scale, input_scale=input_scale)
        for name, scale, input_scale in (("q", 0.5, 0.01), ("k", 1.0, 0.02), ("v", 4.0, 0.03))
    ]
    kept = store()
    together = torch.cat([linear_fp8(x, part, x.dtype, kept=kept) for part in parts], 1)
    assert_close(together, torch.cat([product(x.double(), part) for part in parts], 1), BOUND)
    shared = [dataclasses.replace(part, scale=4.0, input_scale=0.03) for part in parts]
    for own, largest in zip(parts[:2], shared[:2], strict=True):
        assert relative_error(linear_fp8(x, own, x.dtype, kept=kept), product(x.double(), largest)) > 0.3


def test_a_row_alone_equals_the_row_in_a_batch() -> None:
    """Sums of e4m3 products are exact here (whole numbers), so any order of summation gives the same bits."""
    g = generator(6)
    weight = dataclasses.replace(random_weight(g, "w", Scheme.FP8, 24, 32), input_scale=1.0)
    codes = (torch.randint(-8, 9, (24, 32), generator=g)).float().to(torch.float8_e4m3fn)
    weight = dataclasses.replace(weight, data=codes)
    x = torch.randint(-8, 9, (9, 32), generator=g).float()
    together = linear_fp8(x, weight, x.dtype, kept=store())
    for row in range(9):
        assert torch.equal(linear_fp8(x[row : row + 1], weight, x[row : row + 1].dtype, kept=store())[0], together[row])
