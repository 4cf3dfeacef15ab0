"""Many tokens times NVFP4 weights on wgmma: against the float64 ledger and its defects, and the same bits in any tile.

Linears of many tokens run in test_linear.py, too.
"""

from __future__ import annotations

import pytest
import torch

from hemiola.formats.weight import Scheme
from hemiola.kernels import nvfp4, nvfp4_wgmma
from hemiola.kernels.nvfp4 import REMAINDER
from hemiola.kernels.nvfp4_wgmma import WideTile
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
)

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)

TILES = [WideTile(tokens, units) for tokens in (128, 96, 64, 32) for units in (2, 1)]


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


@pytest.mark.parametrize(("out_size", "in_size"), [(3712, 2688), (2688, 3712), (144, 1072)])
def test_linears_do_not_depend_on_tiles_or_neighbours(out_size: int, in_size: int) -> None:
    g = torch.Generator("cuda").manual_seed(SEED)
    weight = random_weight(g, "w", Scheme.NVFP4, out_size, in_size, 1.0)
    assert weight.block_scale is not None
    assert weight.scale is not None
    packed, alpha = nvfp4.packed(weight.data, weight.block_scale), weight.scale * REMAINDER
    x = torch.randn(700, in_size, generator=g, device="cuda").bfloat16()
    together = nvfp4_wgmma.linear(x, *packed, out_size, alpha, False, None)
    for tile in TILES:
        for some in (slice(0, 700), slice(0, 1), slice(100, 164), slice(50, 433)):
            result = nvfp4_wgmma.linear(x[some], *packed, out_size, alpha, False, None, tile)
            assert torch.equal(result, together[some])


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
    assert torch.count_nonzero(nvfp4_wgmma._counter(given.x.device)) == 0


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
