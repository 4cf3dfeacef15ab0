"""The linears' kernels: every scheme, at odd sizes, against float64 with every rounding written out."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from hemiola.formats.weight import Scheme, Weight
from hemiola.kernels import linear_bf16, linear_dense, linear_fp8, linear_nvfp4, nvfp4, split_k
from hemiola.kernels.quantize import quantize
from hemiola.kernels.split_k import DotTile
from hemiola.ops.device.linear import run, run_joined
from hemiola.ops.resident import ResidentWeights
from tests.support.linears import finished, launch
from tests.support.numerics import assert_ledger, bf16, generator, randn
from tests.support.weights import SCHEMES, product, random_weight

SMALL = DotTile(32, 16, 64, 2, 4)
WHOLE = SMALL._replace(columns=128)  # NVFP4's come in tiles of 128
SPLIT = WHOLE._replace(programs=9)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes a program at a time; and the tables' ends come into reach."""
    monkeypatch.setattr(linear_nvfp4, "TILES", ((4, SPLIT), (1 << 31, WHOLE)))
    monkeypatch.setattr(linear_nvfp4, "INVARIANT", WHOLE)
    monkeypatch.setattr(linear_fp8, "INVARIANT", SMALL)
    monkeypatch.setattr(linear_fp8, "FALLBACK", SMALL)
    monkeypatch.setattr(linear_bf16, "INVARIANT", SMALL)


def inputs(scheme: Scheme, num_tokens: int, out_size: int, in_size: int, seed: int) -> tuple[Tensor, Weight]:
    g = generator(seed)
    x = randn(g, num_tokens, in_size + 7, dtype=torch.bfloat16)[:, 5 : 5 + in_size]  # rows of something wider
    return x, random_weight(g, "w", scheme, out_size, in_size)


def sizes_of(scheme: Scheme) -> list[tuple[int, int]]:
    """(out, in): multiples of everything, and of as little as the scheme allows."""
    odd = {Scheme.PLAIN: (37, 67), Scheme.FP8: (37, 67), Scheme.NVFP4: (37, 80)}[scheme]
    return [(64, 128), odd]


CASES = [(scheme, *sizes) for scheme in SCHEMES for sizes in sizes_of(scheme)]


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3, 17, 21])
@pytest.mark.parametrize(("scheme", "out_size", "in_size"), CASES)
def test_product(scheme: Scheme, out_size: int, in_size: int, num_tokens: int, invariant: bool) -> None:
    x, weight = inputs(scheme, num_tokens, out_size, in_size, seed=num_tokens)
    result = launch(x, weight, invariant=invariant)
    exact = product(x.double(), weight)
    assert result.shape == (num_tokens, out_size)
    if scheme is Scheme.FP8:  # the accumulator of exact products is exact here: nothing may differ
        assert torch.equal(result.double(), bf16(exact))
    assert_ledger(result, exact, {"one bf16 step more": exact * (1 + 2.0**-7)})


@pytest.mark.parametrize("num_tokens", [1, 5, 33])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_epilogues(scheme: Scheme, num_tokens: int) -> None:
    x, weight = inputs(scheme, num_tokens, 64, 128, seed=num_tokens + 50)
    exact = product(x.double(), weight)
    assert_ledger(
        launch(x, weight, relu_squared=True),
        finished(exact, relu_squared=True),
        {"no rounding before the square": exact.clamp(min=0).square(), "no relu": bf16(exact).square()},
    )
    quantized = launch(x, weight, relu_squared=True, out_scale=0.0137)
    assert quantized.dtype == torch.float8_e4m3fn
    expected = finished(exact, True, 0.0137)
    assert (quantized.double() != expected).double().mean() < 0.01  # another order of summation, near a midpoint
    assert (quantized.double() != finished(exact, True, 0.0139)).double().mean() > 0.02
    assert (launch(x, weight, out_scale=1e-4).double().abs().max()) == 448


def test_activations_may_come_as_codes() -> None:
    x, weight = inputs(Scheme.FP8, 3, 64, 128, seed=1)
    assert weight.input_scale is not None
    codes = (x.float() / torch.tensor(weight.input_scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(launch(codes, weight), launch(x, weight))


def test_a_poor_row_spoils_no_other() -> None:
    for scheme in SCHEMES:
        x, weight = inputs(scheme, 3, 64, 128, seed=2)
        spoiled = x.clone()
        spoiled[1] = torch.nan
        result, expected = launch(spoiled, weight, relu_squared=True), launch(x, weight, relu_squared=True)
        assert result[1].isnan().all()
        assert torch.equal(result[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_invariant_rows_do_not_depend_on_their_neighbours(scheme: Scheme) -> None:
    x, weight = inputs(scheme, 19, 37, 80, seed=3)
    together = launch(x, weight, invariant=True)
    for some in (slice(0, 1), slice(4, 9), slice(2, 19)):
        assert torch.equal(launch(x[some], weight, invariant=True), together[some])


def test_splits_add_up_in_their_order_and_leave_the_tickets_as_they_were() -> None:
    x, weight = inputs(Scheme.NVFP4, 3, 70, 320, seed=4)
    assert weight.block_scale is not None
    packed = nvfp4.packed(weight.data, weight.block_scale)
    grid, partial, _ = split_k.split(SPLIT, 70, 3, 320, x.device)
    assert grid == (3, 1, 3)
    assert partial is not None
    assert partial.numel() == 3 * 3 * 32 * 16
    assert weight.scale is not None
    for _ in range(2):
        result = linear_nvfp4.dot(x, *packed, 70, weight.scale, False, None, SPLIT)
        assert_ledger(result, product(x.double(), weight), {})
    assert torch.count_nonzero(split_k.tickets(x.device)) == 0


def test_nothing_is_split_without_need() -> None:
    device = torch.device("cpu")
    assert split_k.split(SMALL, 70, 3, 320, device).grid == (3, 1, 1)
    assert split_k.split(SMALL._replace(programs=5), 70, 3, 320, device).grid == (3, 1, 1)
    assert split_k.split(SMALL._replace(programs=900), 70, 3, 320, device).grid == (3, 1, 5)  # each gets a step


def test_long_rows_are_streamed_in_larger_pieces_or_not_at_all() -> None:
    tile = linear_dense.GemvTile(4, 512)
    assert linear_dense.gemv_tile(tile, 4096) == tile
    assert linear_dense.gemv_tile(tile, 4097) == (2, 1024, 4)
    assert linear_dense.gemv_tile(tile, 16384) == (1, 2048, 4)
    assert linear_dense.gemv_tile(tile, 16385) is None


def test_a_decoded_weight_is_exact() -> None:
    """The identity times the weight, whose values are exact in bfloat16 without their tensor's scale."""
    _, weight = inputs(Scheme.NVFP4, 1, 19, 112, seed=6)
    assert weight.block_scale is not None
    packed = nvfp4.packed(weight.data, weight.block_scale)
    product = linear_nvfp4.linear_nvfp4(torch.eye(112, dtype=torch.bfloat16), *packed, 19, 1.0)
    assert torch.equal(product.float().T, weight.codes())


def test_no_tokens() -> None:
    for scheme in SCHEMES:
        for invariant in (False, True):
            x, weight = inputs(scheme, 0, 64, 128, seed=7)
            assert launch(x, weight, True, None, invariant).shape == (0, 64)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_several_of_one_input_are_one_product_of_one_matrix(stored: torch.dtype) -> None:
    g, device = generator(8), torch.device("cpu")
    resident, apart = ResidentWeights(device), ResidentWeights(device)
    weights = [random_weight(g, name, Scheme.PLAIN, size, 80) for name, size in (("q", 40), ("k", 9), ("v", 9))]
    weights = [dataclasses.replace(weight, data=weight.data.to(stored)) for weight in weights]
    for num_tokens in (1, 5):
        x = randn(g, num_tokens, 80, dtype=torch.bfloat16)
        for invariant in (False, True):
            results = run_joined(x, weights, torch.bfloat16, resident=resident, invariant=invariant)
            for result, weight in zip(results, weights, strict=True):
                alone = run(x, weight, torch.bfloat16, resident=apart, invariant=invariant)
                assert_ledger(result, alone.double(), {"another row": alone.double().roll(1, 1)})
                assert result.shape == alone.shape
    assert list(resident.built.values()) == [1]
    assert resident.resident_bytes == apart.resident_bytes == 2 * 58 * 80


@pytest.mark.parametrize("scale", [1.0, 0.011, 1e30, 3e-38, 0.7, 0.75, 6 / 448, 1 / 3, 7.0, 0.875])
def test_codes_of_every_number(scale: float) -> None:
    """Quotients without a division are those of divisions: every bfloat16 number, also infinite and NaN. With the last
    two scales a product with the inverse alone gives 60 other codes. A zero keeps its sign."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(32, 2048)
    codes = quantize(x, scale)
    expected = (x.float() / torch.tensor(scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(codes.isnan(), expected.isnan())
    number = ~codes.isnan()
    assert torch.equal(codes.view(torch.uint8)[number], expected.view(torch.uint8)[number])
