"""FP8 and BF16 linears of a few tokens on wgmma: every kind of tile against a float64 product, and its defects.

They run in test_linear.py, too, with the tiles that they get there.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hemiola.formats.weight import Scheme, Weight
from hemiola.kernels import dense_wgmma
from hemiola.kernels.dense_wgmma import Tile
from hemiola.kernels.linear_bf16 import linear_bf16
from hemiola.kernels.linear_fp8 import linear_fp8
from tests.device.test_linear import GAP, SEED, defects, poison, random_weight, values
from tests.support.linears import finished, fp8_form
from tests.support.numerics import relative_error

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)

SAFE = ("-DSPIN_LIMIT_NS=2000000000ull",)
SIZES = [(10304, 2688), (2688, 4096), (3712, 2688), (2688, 3712), (272, 1040), (16, 16), (144, 400)]
FEW = (3, 5, 8, 9, 16, 17, 32, 33, 64)  # what the kernel is for
TOKENS = (*FEW, 65, 128)
# Of every width, alone and with columns shared out; more stages than steps, and few.
TILES = [
    *(Tile(tokens, rows, 1, 4, 4) for tokens in (8, 16, 32, 64, 128) for rows in (16, 80, 104, 256)),
    *(Tile(tokens, 64, splits, 3, 3) for tokens in (8, 16, 32, 64, 128) for splits in (2, 3, 4, 5, 8)),
    *(Tile(32, 168, 8, 3, 2), Tile(24, 88, 4, 7, 5), Tile(8, 24, 4, 8, 3), Tile(72, 88, 2, 4, 2)),
    *(Tile(16, 80, 1, 9, 18), Tile(8, 24, 1, 24, 20), Tile(8, 56, 1, 13, 2)),
]
TILES = [tile for tile in TILES if dense_wgmma.shared_bytes(tile) <= 227 << 10]
SCHEMES = pytest.mark.parametrize("scheme", [Scheme.FP8, Scheme.PLAIN], ids=["fp8", "bf16"])


def inputs(num_tokens: int, in_size: int, scheme: Scheme = Scheme.FP8) -> Tensor:
    """Rows are apart, and begin at 16 bytes."""
    g = torch.Generator("cuda").manual_seed(SEED + num_tokens)
    x = torch.randn(num_tokens, in_size + 32, generator=g, device="cuda")
    x = (x * 60).clamp(-448, 448).to(torch.float8_e4m3fn) if scheme is Scheme.FP8 else x.bfloat16()
    return x[:, 16 : 16 + in_size]


def run(
    x: Tensor, weight: Weight, tile: Tile | None, relu_squared: bool = False, out_scale: float | None = None
) -> Tensor:
    poison(len(x), len(weight.data))
    return dense_wgmma.linear(x, weight.data, weight.scale or 1.0, relu_squared, out_scale, tile, SAFE)


def fitting(x: Tensor, out_size: int) -> list[Tile]:
    """The one that it gets, first."""
    num_tokens, steps = len(x), -(-x.shape[1] * x.itemsize // 128)
    own = dense_wgmma.linear_tile(num_tokens, out_size, steps)
    return [*([own] if own else ()), *(tile for tile in TILES if num_tokens <= tile.tokens and tile.splits <= steps)]


@SCHEMES
@pytest.mark.parametrize(("out_size", "in_size"), SIZES)
def test_every_tile_against_float64(out_size: int, in_size: int, scheme: Scheme) -> None:
    weight = random_weight(scheme, out_size, in_size)
    plain = Weight("w", weight.shape, Scheme.PLAIN, values(weight))
    for num_tokens in TOKENS:
        x = inputs(num_tokens, in_size, scheme)
        exact = x.double() @ values(weight).T
        found = defects(x.double(), plain, exact)
        for tile in fitting(x, out_size):
            result = run(x, weight, tile).double()
            error = relative_error(result, exact)
            for name, other in found.items():
                wrong = relative_error(other, exact)
                share = abs(float(((result - exact) * (other - exact)).sum() / (other - exact).square().sum()))
                where = f"{out_size}x{in_size} T={num_tokens} {tile}: {error:.2e}, {name} {wrong:.2e}, {share:.1e}"
                assert wrong > GAP * error, where
                assert share < 1 / GAP, where


@SCHEMES
@pytest.mark.parametrize("tile", [None, *TILES[::3]], ids=str)
def test_epilogues_to_the_bit(tile: Tile | None, scheme: Scheme) -> None:
    """Of what the same tile writes without them."""
    weight = random_weight(scheme, 272, 1040)
    scale = 0.0137
    for num_tokens in (3, 17, 64):
        if tile and num_tokens > tile.tokens:
            continue
        x = inputs(num_tokens, 1040, scheme)
        plain = run(x, weight, tile).cpu().double()
        for relu_squared, out_scale in ((True, None), (True, scale), (False, scale)):
            result = run(x, weight, tile, relu_squared, out_scale)
            assert torch.equal(result.cpu().double(), finished(plain, relu_squared, out_scale))


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_bits_depend_on_the_number_of_splits_alone(tile: Tile) -> None:
    """Not on who is first, on neighbours, or on a tile's size."""
    weight = random_weight(Scheme.FP8, 2688, 4096)
    x = inputs(tile.tokens, 4096)
    together = run(x, weight, Tile(64 if tile.tokens <= 64 else 128, 64, tile.splits, 3, 3))
    for _ in range(20):
        assert torch.equal(run(x, weight, tile), together)
    assert torch.equal(run(x[2:7], weight, tile), together[2:7])


@SCHEMES
@pytest.mark.parametrize(("out_size", "in_size"), [(10304, 2688), (2688, 4096)])
def test_runs_repeat_to_the_bit(out_size: int, in_size: int, scheme: Scheme) -> None:
    """With the tile that each gets."""
    weight = random_weight(scheme, out_size, in_size)
    for num_tokens in FEW:
        x = inputs(num_tokens, in_size, scheme)
        first = run(x, weight, None)
        for _ in range(50):
            assert torch.equal(run(x, weight, None), first)


@SCHEMES
@pytest.mark.parametrize("num_tokens", FEW)
def test_a_graph_of_a_chain_follows_its_inputs(num_tokens: int, scheme: Scheme) -> None:
    """Up and down as the shared expert's; each starts while the one before it is still running."""
    up, down = random_weight(scheme, 3712, 2688), random_weight(scheme, 2688, 3712)
    is_fp8 = scheme is Scheme.FP8
    x = inputs(num_tokens, 2688, scheme).contiguous()
    forms = [fp8_form(weight, "cuda") for weight in (up, down)] if is_fp8 else []

    def chain() -> Tensor:
        y = x
        for _ in range(8):
            if is_fp8:
                y = linear_fp8(linear_fp8(y, forms[0], True, 0.011), forms[1]).clamp(-4, 4)
            else:
                y = linear_bf16(linear_bf16(y, up.data, True), down.data).clamp(-4, 4)
        return y

    assert dense_wgmma.takes(x, up.data)
    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain()
    for seed in range(3):
        x.copy_(inputs(num_tokens + 1 + seed, 2688, scheme)[:num_tokens])
        graph.replay()
        once = result.clone()
        graph.replay()
        assert torch.equal(result, once)
        assert torch.equal(result, chain())
        assert bool(result.isfinite().all())


@pytest.mark.parametrize("num_tokens", [5, 20, 64])
def test_early_reads_what_the_kernel_two_before_wrote(num_tokens: int) -> None:
    """x is made by one kernel, another one follows that waits for it, and then the product, with the bits of a chain
    without `early`."""
    up, other = random_weight(Scheme.PLAIN, 3712, 2688).data, random_weight(Scheme.PLAIN, 2688, 2688).data
    x = inputs(num_tokens, 2688, Scheme.PLAIN).contiguous()

    def chain(early: bool) -> list[Tensor]:
        y, results = x, []
        for _ in range(8):
            y = dense_wgmma.linear(y, other).clamp(-4, 4)
            y = dense_wgmma.linear(y, other)
            dense_wgmma.linear(y, other)  # stands for the router
            results.append(dense_wgmma.linear(y, up, 1.0, True, early=early))
        return results

    chain(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain(True)
    for seed in range(3):
        x.copy_(inputs(num_tokens + 1 + seed, 2688, Scheme.PLAIN)[:num_tokens])
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(mine, wanted) for mine, wanted in zip(result, chain(False), strict=True))


def test_what_is_not_taken() -> None:
    """Too few tokens or too many, what cannot be copied, and what no tile fits."""
    weight = random_weight(Scheme.FP8, 272, 1040).data
    x = inputs(8, 1040)
    assert dense_wgmma.takes(x, weight)
    assert not dense_wgmma.takes(x[:2], weight)
    assert dense_wgmma.takes(inputs(64, 1040), weight)
    assert not dense_wgmma.takes(inputs(65, 1040), weight)
    assert not dense_wgmma.takes(inputs(8, 16), random_weight(Scheme.FP8, 16, 16).data)
    assert not dense_wgmma.takes(x.bfloat16(), weight)
    assert not dense_wgmma.takes(inputs(8, 1041)[:, 1:], weight)  # begins at a byte
    assert not dense_wgmma.takes(inputs(8, 1048)[:, :1040], weight)  # rows 1080 apart
    assert not dense_wgmma.takes(inputs(8, 1036)[:, :1032], weight[:, :1032])
    plain = random_weight(Scheme.PLAIN, 272, 1040).data
    assert dense_wgmma.takes(inputs(8, 1040, Scheme.PLAIN), plain)
    large = torch.empty(256 * 132 + 8, 1040, dtype=torch.bfloat16, device="cuda")
    assert not dense_wgmma.takes(inputs(8, 1040, Scheme.PLAIN), large)  # more than a wave of blocks
