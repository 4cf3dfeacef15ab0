"""Many tokens times NVFP4 weights on wgmma: against the float64 ledger and its defects, and the same bits in any tile,
or in any with as many splits of the columns.

Linears of many tokens run in test_linear.py, too.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from hemiola.formats.weight import Scheme
from hemiola.kernels import nvfp4, nvfp4_wgmma
from hemiola.kernels.linear_nvfp4 import linear_nvfp4
from hemiola.kernels.nvfp4 import REMAINDER
from hemiola.kernels.nvfp4_wgmma import SplitTile, WideTile
from tests.device.test_experts import (
    DEFECTS,
    GAP,
    LATENT,
    LIGHTNING,
    ODD,
    SEED,
    Inputs,
    check_groups,
    distance,
    inputs,
    layer,
    ledger,
    poison,
    random_weight,
    values,
)
from tests.support.linears import finished
from tests.support.numerics import relative_error

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)

TILES = [WideTile(tokens, units) for tokens in (128, 96, 64, 32) for units in (2, 1)]
# 16 rows of the last unit of 128, columns of a last step that is not full, and nine steps.
LINEARS = [(3712, 2688), (2688, 3712), (144, 1072)]
SAFE = ("-DSPIN_LIMIT_NS=2000000000ull",)
RAGGED = (1, 65, 100, 128, 129, 256, 300, 512)


@pytest.mark.parametrize("geometry", [LIGHTNING, LATENT, ODD], ids=["lightning", "latent", "odd"])
def test_the_ledger_and_not_a_defect(geometry: tuple[int, int, int, int, tuple[int, ...]]) -> None:
    num_experts, top_k, hidden, inter, _ = geometry
    case = layer(Scheme.NVFP4, num_experts, hidden, inter)
    for num_tokens in (1, 70, 700):
        given = inputs(num_tokens, num_experts, top_k, hidden)
        exact = ledger(case, given)
        poison(given, case)
        error = distance(nvfp4_wgmma.experts(*given[:3], *case.packed, 2.5, given.shared), exact)
        some = Inputs(*(t[:20] for t in given))
        errors = {
            name: distance(ledger(case, some, name), exact[:20]) for name in (*DEFECTS, "scale of another expert")
        }
        smallest = min(errors, key=lambda name: errors[name])
        print(f"{geometry[:4]} T={num_tokens}: {error:.2e}, {smallest} {errors[smallest]:.2e}")
        assert errors[smallest] > GAP * error, (num_tokens, smallest)


def test_experts_do_not_depend_on_tiles_or_neighbours() -> None:
    num_experts, top_k, hidden, inter, _ = LIGHTNING
    case = layer(Scheme.NVFP4, num_experts, hidden, inter)
    given = inputs(500, num_experts, top_k, hidden)

    def run(given: Inputs, tile: WideTile) -> torch.Tensor:
        return nvfp4_wgmma.experts(*given[:3], *case.packed, 2.5, given.shared, tile)

    together = run(given, TILES[0])
    for tile in TILES:
        assert torch.equal(run(given, tile), together)
        for some in (slice(0, 1), slice(7, 15), slice(50, 500)):
            assert torch.equal(run(Inputs(*(t[some] for t in given)), tile), together[some])


class Linear(NamedTuple):
    dense: Tensor
    packed: tuple[Tensor, Tensor]
    alpha: float
    x: Tensor

    def run(
        self,
        x: Tensor,
        tile: WideTile | SplitTile | None = None,
        relu_squared: bool = False,
        out_scale: float | None = None,
        invariant: bool = False,
        early: bool = False,
    ) -> Tensor:
        """In memory that was full of NaN."""
        out_size = len(self.dense)
        torch.full((len(x), out_size), torch.nan, dtype=torch.bfloat16, device="cuda")
        epilogue = (self.alpha, relu_squared, out_scale)
        return nvfp4_wgmma.linear(x, *self.packed, out_size, *epilogue, tile, SAFE, invariant, early)


def linear(out_size: int, in_size: int, num_tokens: int = 700) -> Linear:
    """Rows of x are apart, and begin at 16 bytes."""
    g = torch.Generator("cuda").manual_seed(SEED)
    weight = random_weight(g, "w", Scheme.NVFP4, out_size, in_size, 1.0)
    assert weight.block_scale is not None
    assert weight.scale is not None
    packed = nvfp4.packed(weight.data, weight.block_scale)
    x = torch.randn(num_tokens, in_size + 8, generator=g, device="cuda").bfloat16()[:, 8:]
    return Linear(values(weight), packed, weight.scale * REMAINDER, x)


@pytest.mark.parametrize(("out_size", "in_size"), LINEARS)
def test_linears_do_not_depend_on_tiles_or_neighbours(out_size: int, in_size: int) -> None:
    case = linear(out_size, in_size)
    together = case.run(case.x, TILES[0])
    tiles: list[WideTile | SplitTile] = [*TILES, *nvfp4_wgmma.split_tiles(1)]
    for tile in tiles:
        for some in (slice(0, 700), slice(0, 1), slice(100, 164), slice(50, 433)):
            assert torch.equal(case.run(case.x[some], tile), together[some]), (tile, some)
    for num_tokens in RAGGED:
        assert torch.equal(case.run(case.x[:num_tokens], invariant=True), together[:num_tokens])


@pytest.mark.parametrize("splits", range(2, 9))
@pytest.mark.parametrize(("out_size", "in_size"), LINEARS)
def test_columns_that_a_cluster_shares_out(out_size: int, in_size: int, splits: int) -> None:
    """Bits depend on the number of splits, and not on tiles, neighbours or who is first."""
    case = linear(out_size, in_size, 512)
    exact = case.x.double() @ case.dense.T
    tiles = [tile for tile in nvfp4_wgmma.split_tiles(splits) if tile.splits == splits]
    together = case.run(case.x, tiles[0])
    error, other = relative_error(together, exact), relative_error(exact * (1 - 1 / splits / 10), exact)
    print(f"{out_size}x{in_size} of {splits}: {error:.2e}, a tenth of a split dropped {other:.2e}")
    assert error < 2.0**-8 < other
    for tile in tiles:
        for num_tokens in RAGGED:
            for _ in range(3):
                result = case.run(case.x[512 - num_tokens :], tile)
                assert torch.equal(result, together[512 - num_tokens :]), (tile, num_tokens)
            early = case.run(case.x[512 - num_tokens :], tile, early=True)
            assert torch.equal(early, together[512 - num_tokens :]), (tile, num_tokens)


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_epilogues_of_a_cluster_to_the_bit(splits: int) -> None:
    case, scale = linear(2688, 1072, 200), 0.0137
    for tile in (tile for tile in nvfp4_wgmma.split_tiles(splits) if tile.splits == splits):
        for num_tokens in (70, 200):
            x = case.x[:num_tokens]
            plain = case.run(x, tile).cpu().double()
            for relu_squared, out_scale in ((True, None), (True, scale), (False, scale)):
                result = case.run(x, tile, relu_squared, out_scale)
                assert torch.equal(result.cpu().double(), finished(plain, relu_squared, out_scale)), tile


@pytest.mark.parametrize("num_tokens", RAGGED[1:])
def test_a_graph_of_linears_follows_its_inputs(num_tokens: int) -> None:
    """Up and down as the shared expert's, each starting while the one before it is still running."""
    up, down = linear(3712, 2688, num_tokens), linear(2688, 3712, num_tokens)
    x = up.x.contiguous()

    def chain() -> Tensor:
        y = x
        for _ in range(8):
            hidden = linear_nvfp4(y, *up.packed, 3712, up.alpha / REMAINDER, True)
            y = linear_nvfp4(hidden, *down.packed, 2688, down.alpha / REMAINDER).clamp(-4, 4)
        return y

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain()
    for seed in range(3):
        g = torch.Generator("cuda").manual_seed(SEED + seed)
        x.copy_(torch.randn(x.shape, generator=g, device="cuda"))
        graph.replay()
        once = result.clone()
        graph.replay()
        assert torch.equal(result, once)
        assert torch.equal(result, chain())
        assert bool(result.isfinite().all())
    assert torch.count_nonzero(nvfp4_wgmma.counter(x.device, "wgmma")) == 0


def test_a_graph_of_a_chain_follows_its_inputs() -> None:
    """Each product starts while the one before it is still running, and takes the same counter."""
    num_experts, top_k, hidden, inter, _ = LIGHTNING
    case = layer(Scheme.NVFP4, num_experts, hidden, inter)
    given = Inputs(*(t.contiguous() for t in inputs(400, num_experts, top_k, hidden)))

    def chain() -> torch.Tensor:
        x = given.x
        for _ in range(4):
            x = nvfp4_wgmma.experts(x, given.ids, given.weights, *case.packed, 0.1, given.shared)
        return x

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain()
    for old, new in zip(given, inputs(401, num_experts, top_k, hidden), strict=True):
        old.copy_(new[1:])
    graph.replay()
    assert torch.equal(result, chain())
    assert torch.count_nonzero(nvfp4_wgmma.counter(given.x.device, "wgmma")) == 0


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "tile"), [(8192, 128, 6, 128), (16384, 128, 6, 16), (3001, 512, 22, 64)]
)
def test_many_pairs_are_grouped_by_expert(num_tokens: int, num_experts: int, top_k: int, tile: int) -> None:
    g = torch.Generator("cuda").manual_seed(SEED)
    order = torch.rand(num_tokens, num_experts, generator=g, device="cuda")
    order[: num_tokens // 2, 3] = -1.0
    routed = order.argsort(1)[:, :top_k].int().contiguous()
    for ids in (routed, torch.full_like(routed, num_experts - 1)):
        check_groups(ids, num_experts, tile)
