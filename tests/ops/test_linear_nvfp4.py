"""Weight-only NVFP4: nibble order, block scales, the global scale, and where it rounds."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hemiola.formats.weight import Scheme
from hemiola.ops.kept import KeptForms
from hemiola.ops.linear_nvfp4 import linear_nvfp4, linear_nvfp4_float32
from tests.support.numerics import assert_close, assert_ledger, bf16, generator, randn, relative_error
from tests.support.weights import product, random_weight, unscaled, values

BOUND = 1e-6


def store() -> KeptForms:
    return KeptForms(1 << 30)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 53])
@pytest.mark.parametrize(("out_size", "in_size"), [(1, 16), (33, 48), (64, 96)])
def test_float32_equals_float64(num_tokens: int, out_size: int, in_size: int) -> None:
    g = generator(out_size)
    x, weight = randn(g, num_tokens, in_size), random_weight(g, "w", Scheme.NVFP4, out_size, in_size)
    expected = product(x.double(), weight)
    assert_close(linear_nvfp4(x, weight, x.dtype, kept=store()), expected, BOUND)
    assert_close(linear_nvfp4_float32(x, weight, kept=store()), expected, BOUND)


def test_the_bound_sees_every_way_to_read_the_file_wrong() -> None:
    g = generator(1)
    x, weight = randn(g, 16, 64), random_weight(g, "w", Scheme.NVFP4, 48, 64)
    assert weight.block_scale is not None
    assert weight.scale is not None
    result = linear_nvfp4(x, weight, x.dtype, kept=store())
    swapped = dataclasses.replace(weight, data=(weight.data << 4) | (weight.data >> 4))
    bytes_of_scales = weight.block_scale.view(torch.uint8)
    shifted = dataclasses.replace(weight, block_scale=bytes_of_scales.roll(1, 1).view(torch.float8_e4m3fn))
    shifted_rows = dataclasses.replace(weight, block_scale=bytes_of_scales.roll(1, 0).view(torch.float8_e4m3fn))
    wrong = {
        "swapped nibbles": x.double() @ values(swapped).T,
        "block scales shifted by a block": x.double() @ values(shifted).T,
        "block scales shifted by a row": x.double() @ values(shifted_rows).T,
        "no global scale": x.double() @ unscaled(weight).T,
        "the global scale divided by": x.double() @ unscaled(weight).T / weight.scale,
        "the input scale in the weight": x.double() @ values(weight).T * 0.007,
        "no sign": x.double() @ values(weight).abs().T,
    }
    assert_close(result, x.double() @ values(weight).T, BOUND)
    for name, other in wrong.items():
        assert relative_error(result, other) > 1000 * BOUND, name


def test_an_input_scale_in_the_file_changes_nothing() -> None:
    g = generator(2)
    x, weight = randn(g, 5, 32), random_weight(g, "w", Scheme.NVFP4, 16, 32)
    assert weight.input_scale is not None
    without = dataclasses.replace(weight, input_scale=None)
    assert torch.equal(linear_nvfp4(x, weight, x.dtype, kept=store()), linear_nvfp4(x, without, x.dtype, kept=store()))


def test_bf16_ledger() -> None:
    """e2m1 times block scale is exact in bf16; the global scale multiplies the unrounded accumulator."""
    g = generator(3)
    x, weight = randn(g, 32, 64, dtype=torch.bfloat16), random_weight(g, "w", Scheme.NVFP4, 64, 64)
    assert weight.scale is not None
    assert torch.equal(bf16(unscaled(weight)), unscaled(weight))
    accumulator = x.double() @ unscaled(weight).T
    result = linear_nvfp4(x, weight, x.dtype, kept=store())
    assert_ledger(
        result,
        accumulator * weight.scale,
        {
            "a rounding before the global scale": bf16(accumulator) * weight.scale,
            "a weight dequantised to bf16": x.double() @ bf16(values(weight)).T,
        },
    )
    assert torch.equal(linear_nvfp4_float32(x, weight, kept=store()).bfloat16(), result)


def test_codes_are_expanded_once() -> None:
    g, kept = generator(4), store()
    x, weight = randn(g, 2, 32), random_weight(g, "w", Scheme.NVFP4, 16, 32)
    first = linear_nvfp4(x, weight, x.dtype, kept=kept)
    assert torch.equal(linear_nvfp4(x, weight, x.dtype, kept=kept), first)
    linear_nvfp4(x.bfloat16(), weight, x.bfloat16().dtype, kept=kept)
    assert (kept.kept_bytes, kept.transient_builds) == (16 * 32 * 4, 0)


def test_unfused_projections_keep_their_own_global_scales() -> None:
    """B16: global scales that differ by a factor of eight."""
    g = generator(5)
    x = randn(g, 7, 64)
    parts = [
        dataclasses.replace(random_weight(g, name, Scheme.NVFP4, 16, 64), scale=scale)
        for name, scale in (("q", 0.001), ("k", 0.008), ("v", 0.001))
    ]
    kept = store()
    together = torch.cat([linear_nvfp4(x, part, x.dtype, kept=kept) for part in parts], 1)
    assert_close(together, torch.cat([product(x.double(), part) for part in parts], 1), BOUND)
    largest = dataclasses.replace(parts[0], scale=0.008)
    assert relative_error(linear_nvfp4(x, parts[0], x.dtype, kept=kept), product(x.double(), largest)) > 0.3


def test_a_row_alone_equals_the_row_in_a_batch() -> None:
    """Exact sums: activations and block scales are whole numbers."""
    g = generator(6)
    weight = random_weight(g, "w", Scheme.NVFP4, 24, 32)
    weight = dataclasses.replace(weight, block_scale=torch.full((24, 2), 2.0).to(torch.float8_e4m3fn))
    x = torch.randint(-8, 9, (9, 32), generator=g).float()
    together = linear_nvfp4(x, weight, x.dtype, kept=store())
    for row in range(9):
        assert torch.equal(
            linear_nvfp4(x[row : row + 1], weight, x[row : row + 1].dtype, kept=store())[0], together[row]
        )
