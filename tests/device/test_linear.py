"""The linears on a GPU against float64: at real sizes and odd ones, for every tile of the tables, and seeded defects.

The bound of each comparison lies between the error that was measured and that of the smallest defect, which has to be
several times larger. Fresh random inputs; outputs come out of memory that was full of NaN.
"""

from __future__ import annotations

import secrets

import pytest
import torch
from torch import Tensor

from hemiola.formats.weight import Scheme, Weight
from hemiola.kernels import split_k
from tests.support.linears import finished, launch
from tests.support.numerics import relative_error
from tests.support.weights import E2M1, SCHEMES

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SEED = secrets.randbelow(2**31)
UNQUANTISED = "activations that are not quantised"
GAP = 4.0  # how many times larger the smallest defect's error has to be

SIZES = {
    Scheme.PLAIN: [(4096, 2688), (256, 2688), (131, 1003)],
    Scheme.FP8: [(10304, 2688), (2688, 4096), (131, 1003), (272, 1040)],
    Scheme.NVFP4: [(3712, 2688), (2688, 3712), (131, 1072)],
}
TOKENS = [1, 2, 3, 8, 17, 32, 33, 65, 129, 513, 2000]


def random_weight(scheme: Scheme, out_size: int, in_size: int) -> Weight:
    g = torch.Generator("cuda").manual_seed(SEED)
    size = in_size**-0.5
    if scheme is Scheme.PLAIN:
        values = torch.randn(out_size, in_size, generator=g, device="cuda") * size
        return Weight("w", (out_size, in_size), scheme, values.bfloat16())
    if scheme is Scheme.FP8:
        codes = (torch.randn(out_size, in_size, generator=g, device="cuda") * 60).clamp(-448, 448)
        return Weight("w", (out_size, in_size), scheme, codes.to(torch.float8_e4m3fn), None, size / 60, 0.011)
    data = torch.randint(0, 256, (out_size, in_size // 2), generator=g, device="cuda", dtype=torch.uint8)
    block_scale = torch.rand(out_size, in_size // 16, generator=g, device="cuda") * 56 + 4
    return Weight("w", (out_size, in_size), scheme, data, block_scale.to(torch.float8_e4m3fn), size / 90, 0.007)


def values(weight: Weight) -> Tensor:
    """(out, in) float64: what the weight stands for, without the package."""
    if weight.scheme is Scheme.PLAIN:
        return weight.data.double()
    assert weight.scale is not None
    if weight.scheme is Scheme.FP8:
        return weight.data.double() * weight.scale
    assert weight.block_scale is not None
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64, device="cuda")
    codes = torch.stack((weight.data & 15, weight.data >> 4), dim=-1).flatten(1)
    return table[codes.int()] * weight.block_scale.double().repeat_interleave(16, 1) * weight.scale


def operand(x: Tensor, weight: Weight) -> Tensor:
    """float64: the activations as they are multiplied."""
    if weight.scheme is not Scheme.FP8:
        return x.double()
    assert weight.input_scale is not None
    scale = torch.tensor(weight.input_scale, device="cuda")
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * weight.input_scale


def activations(num_tokens: int, in_size: int) -> Tensor:
    g = torch.Generator("cuda").manual_seed(SEED + num_tokens)
    return torch.randn(num_tokens, in_size + 8, generator=g, device="cuda").bfloat16()[:, 8:]


def poison(num_tokens: int, out_size: int) -> None:
    """Memory of a result's size, full of NaN, for the allocator to hand out next."""
    for dtype in (torch.bfloat16, torch.float32):
        torch.full((num_tokens, out_size), torch.nan, dtype=dtype, device="cuda")


def defects(x: Tensor, weight: Weight, exact: Tensor) -> dict[str, Tensor]:
    """Products as they would be with one thing wrong in a kernel."""
    dense, a = values(weight), operand(x, weight)
    in_size = weight.shape[1]
    tail = min(16, in_size)
    found = {
        "the last columns dropped": exact - a[:, -tail:] @ dense[:, -tail:].T,
        "the first columns dropped": exact - a[:, :tail] @ dense[:, :tail].T,
        "rows shifted by one": exact.roll(1, 1),
    }
    if len(x) > 1:
        found["tokens shifted by one"] = exact.roll(1, 0)
    if weight.scheme is Scheme.FP8:
        found[UNQUANTISED] = x.double() @ dense.T
    if weight.scheme is Scheme.NVFP4:
        found["swapped nibbles"] = a @ dense.view(len(dense), -1, 2).flip(-1).reshape(dense.shape).T
        halves = torch.cat((dense[:, 32:64], dense[:, :32], dense[:, 64:]), 1)
        found["lo and hi of a group swapped"] = a @ halves.T
        assert weight.block_scale is not None
        scales = weight.block_scale.double()
        wrong = dense / scales.repeat_interleave(16, 1) * scales.roll(1, 1).repeat_interleave(16, 1)
        found["block scales shifted by one"] = a @ wrong.T
    return found


@pytest.mark.parametrize("in_size", [16, 48, 64, 112])
def test_rows_of_less_than_a_tile(in_size: int) -> None:
    """Some lanes of the CUDA kernel have no bytes of such a row."""
    weight = random_weight(Scheme.NVFP4, 40, in_size)
    for num_tokens in (1, 3, 9, 40, 100):
        x = activations(num_tokens, in_size)
        exact = operand(x, weight) @ values(weight).T
        poison(num_tokens, 40)
        assert relative_error(launch(x, weight), exact) < 2.0**-8


CASES = [(scheme, *size) for scheme in SCHEMES for size in SIZES[scheme]]


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("scheme", "out_size", "in_size"), CASES)
def test_product(scheme: Scheme, out_size: int, in_size: int, invariant: bool) -> None:
    weight = random_weight(scheme, out_size, in_size)
    for num_tokens in TOKENS:
        x = activations(num_tokens, in_size)
        exact = operand(x, weight) @ values(weight).T
        poison(num_tokens, out_size)
        result = launch(x, weight, invariant=invariant).double()
        error = relative_error(result, exact)
        for name, other in defects(x, weight, exact).items():
            wrong = relative_error(other, exact)
            # How much of the defect is in the result: 0 without it, 1 with it. Where the tensor cores' own rounding is
            # large, as in FP8, it tells them apart when sizes do not.
            share = abs(float(((result - exact) * (other - exact)).sum() / (other - exact).square().sum()))
            where = f"{scheme.name} {out_size}x{in_size} T={num_tokens}"
            print(f"{where}: {error:.2e}, {name} {wrong:.2e}, share {share:.1e}")
            assert wrong > 2 * error, (num_tokens, name)
            assert wrong > GAP * error or (name == UNQUANTISED and share < 1 / GAP**2), (num_tokens, name)
            assert share < 1 / GAP, (num_tokens, name)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_epilogues_to_the_bit(scheme: Scheme) -> None:
    """Of what the same kernel writes without them."""
    weight = random_weight(scheme, *SIZES[scheme][0])
    scale = 0.0137
    for num_tokens in (1, 8, 100, 600):
        x = activations(num_tokens, weight.shape[1])
        plain = launch(x, weight).cpu().double()
        squared = finished(plain, True)
        assert torch.equal(launch(x, weight, True).cpu().double(), squared)
        assert torch.equal(launch(x, weight, True, scale).cpu().double(), finished(plain, True, scale))
        assert torch.equal(launch(x, weight, False, scale).cpu().double(), finished(plain, False, scale))
        unrounded = (operand(x, weight) @ values(weight).T).clamp(min=0).square().bfloat16().cpu().double()
        assert (squared != unrounded).double().mean() > 0.05  # what a square of the accumulator would be


@pytest.mark.parametrize("scheme", SCHEMES)
def test_invariant_rows_do_not_depend_on_their_neighbours(scheme: Scheme) -> None:
    for out_size, in_size in SIZES[scheme]:
        weight = random_weight(scheme, out_size, in_size)
        x = activations(300, in_size)
        together = launch(x, weight, invariant=True)
        for some in (slice(0, 1), slice(7, 15), slice(100, 164), slice(50, 300)):
            assert torch.equal(launch(x[some], weight, invariant=True), together[some])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_runs_repeat_to_the_bit(scheme: Scheme) -> None:
    """Splits finish in any order, and their sum must not."""
    weight = random_weight(scheme, *SIZES[scheme][0])
    for num_tokens in (1, 8, 64):
        x = activations(num_tokens, weight.shape[1])
        first = launch(x, weight)
        for _ in range(50):
            assert torch.equal(launch(x, weight), first)
    assert torch.count_nonzero(split_k.tickets(x.device)) == 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_graph_computes_what_is_in_its_inputs_when_it_is_replayed(scheme: Scheme) -> None:
    weight = random_weight(scheme, *SIZES[scheme][0])
    for num_tokens in (1, 8, 200):
        x = activations(num_tokens, weight.shape[1]).contiguous()
        launch(x, weight)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            # A chain: each product starts while the one before it is still running.
            results = [launch(x, weight) for _ in range(5)]
        x.copy_(activations(num_tokens + 1, weight.shape[1])[1:])
        graph.replay()
        for result in results:
            assert torch.equal(result, launch(x, weight))


def test_every_code_with_every_scale() -> None:
    """The decoding in packed arithmetic: 16 codes with the 254 scales that are numbers, to the bit."""
    codes = torch.arange(16, dtype=torch.uint8)
    data = (codes[0::2] | codes[1::2] << 4).repeat(16, 16).cuda()
    numbers = [code for code in range(256) if code & 0x7F != 0x7F]
    scales = torch.tensor([*numbers, 0, 0], dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn).view(16, 16)
    weight = Weight("w", (16, 256), Scheme.NVFP4, data, scales, 1.0)
    identity = torch.eye(256, dtype=torch.bfloat16, device="cuda")
    for tokens in (8, 16, 64, 256):  # through the product, each column alone: exact where bfloat16 is
        product = launch(identity[:tokens], weight)
        assert torch.equal(product.double(), values(weight).T[:tokens])
