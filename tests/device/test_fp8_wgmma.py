"""FP8 linears of a few tokens on wgmma: every kind of tile against a float64 product of the codes, and its defects.

They run in test_linear.py, too, with the tiles that they get there.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hemiola.formats.weight import Scheme, Weight
from hemiola.kernels import fp8_wgmma
from hemiola.kernels.fp8_wgmma import Tile
from hemiola.kernels.linear_fp8 import linear_fp8
from tests.device.test_linear import GAP, SEED, defects, poison, random_weight, values
from tests.support.linears import finished, fp8_form
from tests.support.numerics import relative_error

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)

SAFE = ("-DSPIN_LIMIT_NS=2000000000ull",)
SIZES = [(10304, 2688), (2688, 4096), (3712, 2688), (2688, 3712), (272, 1040), (16, 16), (144, 400)]
FEW = (3, 5, 8, 9, 16, 17, 32)  # what the kernel is for
TOKENS = (*FEW, 33, 64)
# Of every width, alone and with columns shared out; more stages than steps, and few.
TILES = [
    *(Tile(tokens, rows, 1, 4) for tokens in (8, 16, 32, 64) for rows in (16, 80, 104, 256)),
    *(Tile(tokens, 64, splits, 3) for tokens in (8, 16, 32, 64) for splits in (2, 3, 4, 5, 8)),
    *(Tile(32, 168, 8, 3), Tile(24, 88, 4, 7), Tile(8, 24, 4, 8)),
    *(Tile(16, 80, 1, 18), Tile(8, 24, 1, 24), Tile(8, 56, 1, 13)),
]


def codes(num_tokens: int, in_size: int) -> Tensor:
    """Rows are apart, and begin at 16 bytes."""
    g = torch.Generator("cuda").manual_seed(SEED + num_tokens)
    x = (torch.randn(num_tokens, in_size + 32, generator=g, device="cuda") * 60).clamp(-448, 448)
    return x.to(torch.float8_e4m3fn)[:, 16 : 16 + in_size]


def run(
    x: Tensor, weight: Weight, tile: Tile | None, relu_squared: bool = False, out_scale: float | None = None
) -> Tensor:
    assert weight.scale is not None
    poison(len(x), len(weight.data))
    return fp8_wgmma.linear(x, weight.data, weight.scale, relu_squared, out_scale, tile, SAFE)


def fitting(num_tokens: int, out_size: int, in_size: int) -> list[Tile]:
    """The one that it gets, first."""
    steps = -(-in_size // 128)
    own = fp8_wgmma.linear_tile(num_tokens, out_size, steps)
    return [*([own] if own else ()), *(tile for tile in TILES if num_tokens <= tile.tokens and tile.splits <= steps)]


@pytest.mark.parametrize(("out_size", "in_size"), SIZES)
def test_every_tile_against_float64(out_size: int, in_size: int) -> None:
    weight = random_weight(Scheme.FP8, out_size, in_size)
    plain = Weight("w", weight.shape, Scheme.PLAIN, values(weight))
    for num_tokens in TOKENS:
        x = codes(num_tokens, in_size)
        exact = x.double() @ values(weight).T
        found = defects(x.double(), plain, exact)
        for tile in fitting(num_tokens, out_size, in_size):
            result = run(x, weight, tile).double()
            error = relative_error(result, exact)
            for name, other in found.items():
                wrong = relative_error(other, exact)
                share = abs(float(((result - exact) * (other - exact)).sum() / (other - exact).square().sum()))
                where = f"{out_size}x{in_size} T={num_tokens} {tile}: {error:.2e}, {name} {wrong:.2e}, {share:.1e}"
                assert wrong > GAP * error, where
                assert share < 1 / GAP, where


@pytest.mark.parametrize("tile", [None, *TILES[::3]], ids=str)
def test_epilogues_to_the_bit(tile: Tile | None) -> None:
    """Of what the same tile writes without them."""
    weight = random_weight(Scheme.FP8, 272, 1040)
    scale = 0.0137
    for num_tokens in (3, 17, 64):
        if tile and num_tokens > tile.tokens:
            continue
        x = codes(num_tokens, 1040)
        plain = run(x, weight, tile).cpu().double()
        for relu_squared, out_scale in ((True, None), (True, scale), (False, scale)):
            result = run(x, weight, tile, relu_squared, out_scale)
            assert torch.equal(result.cpu().double(), finished(plain, relu_squared, out_scale))


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_bits_depend_on_the_number_of_splits_alone(tile: Tile) -> None:
    """Not on who is first, on neighbours, or on a tile's size."""
    weight = random_weight(Scheme.FP8, 2688, 4096)
    x = codes(tile.tokens, 4096)
    together = run(x, weight, Tile(64, 64, tile.splits, 4))
    for _ in range(20):
        assert torch.equal(run(x, weight, tile), together)
    assert torch.equal(run(x[2:7], weight, tile), together[2:7])


@pytest.mark.parametrize(("out_size", "in_size"), [(10304, 2688), (2688, 4096)])
def test_runs_repeat_to_the_bit(out_size: int, in_size: int) -> None:
    """With the tile that each gets."""
    weight = random_weight(Scheme.FP8, out_size, in_size)
    for num_tokens in FEW:
        x = codes(num_tokens, in_size)
        first = run(x, weight, None)
        for _ in range(50):
            assert torch.equal(run(x, weight, None), first)


@pytest.mark.parametrize("num_tokens", FEW)
def test_a_graph_of_a_chain_follows_its_inputs(num_tokens: int) -> None:
    """Up and down as the shared expert's, and in_proj's shape; each starts while the one before it is still running."""
    up, down = random_weight(Scheme.FP8, 3712, 2688), random_weight(Scheme.FP8, 2688, 3712)
    forms = [fp8_form(weight, "cuda") for weight in (up, down)]
    x = codes(num_tokens, 2688).contiguous()

    def chain() -> Tensor:
        y = x
        for _ in range(8):
            hidden = linear_fp8(y, forms[0], True, 0.011)
            y = linear_fp8(hidden, forms[1]).clamp(-4, 4)
        return y

    assert fp8_wgmma.takes(x, up.data)
    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain()
    for seed in range(3):
        x.copy_(codes(num_tokens + 1 + seed, 2688)[:num_tokens])
        graph.replay()
        once = result.clone()
        graph.replay()
        assert torch.equal(result, once)
        assert torch.equal(result, chain())
        assert bool(result.isfinite().all())


def test_what_is_not_taken() -> None:
    """Too few tokens or too many, what cannot be copied, and what no tile fits."""
    weight = random_weight(Scheme.FP8, 272, 1040).data
    x = codes(8, 1040)
    assert fp8_wgmma.takes(x, weight)
    assert not fp8_wgmma.takes(x[:2], weight)
    assert fp8_wgmma.takes(codes(32, 1040), weight)
    assert not fp8_wgmma.takes(codes(33, 1040), weight)
    assert not fp8_wgmma.takes(codes(8, 16), random_weight(Scheme.FP8, 16, 16).data)
    assert not fp8_wgmma.takes(x.bfloat16(), weight)
    assert not fp8_wgmma.takes(codes(8, 1041)[:, 1:], weight)  # begins at a byte
    assert not fp8_wgmma.takes(codes(8, 1048)[:, :1040], weight)  # rows 1080 apart
    assert not fp8_wgmma.takes(codes(8, 1036)[:, :1032], weight[:, :1032])
