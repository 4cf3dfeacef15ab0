"""Pairs grouped by expert on wgmma: every tile of the tables against a float64 ledger and its defects, and what no bit
depends on.

They run in test_experts.py, too, with the tiles that they get there.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from hemiola.formats.weight import Experts, Scheme, SharedExpert
from hemiola.kernels import experts as kernels
from hemiola.kernels import grouped_wgmma, rows_mma
from hemiola.kernels.experts import ExpertWeights
from hemiola.kernels.grouped_wgmma import Fp8Tile, WgmmaTile
from hemiola.ops.device import moe_experts as device
from hemiola.ops.resident import ResidentWeights
from tests.device.test_experts import (
    DEFECTS,
    GAP,
    KERNELS,
    LIGHTNING,
    ODD,
    SEED,
    Inputs,
    as_linears,
    bf16,
    distance,
    inputs,
    layer,
    ledger,
    product,
    shared_expert,
    values,
)
from tests.support.weights import SCHEMES

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)

SAFE = ("-DSPIN_LIMIT_NS=2000000000ull",)
TILES = [(scheme, tile) for scheme in SCHEMES for _, tile in rows_mma.WGMMA_TILES[KERNELS[scheme]] if tile]
every_tile = pytest.mark.parametrize(("scheme", "tile"), TILES, ids=lambda value: getattr(value, "name", str(value)))
every_scheme = pytest.mark.parametrize("scheme", sorted({s for s, _ in TILES}, key=SCHEMES.index), ids=lambda s: s.name)


class Sizes(NamedTuple):
    """Of a layer. Expert 1 is never taken, and expert 0 by about half of the tokens."""

    num_experts: int
    top_k: int
    hidden: int
    inter: int


REAL = Sizes(*LIGHTNING[:4])
# No whole steps of columns, nor whole tiles of weights; less than a step; strips of several shares.
SMALL = [Sizes(*ODD[:4]), Sizes(7, 3, 144, 80), Sizes(12, 5, 400, 336), Sizes(6, 2, 1040, 784)]
every_size = pytest.mark.parametrize("sizes", [REAL, *SMALL], ids=lambda sizes: "-".join(map(str, sizes)))


class Expected(NamedTuple):
    given: Inputs
    exact: Tensor
    defects: dict[str, float]  # their distances


@cache
def expected(scheme: Scheme, sizes: Sizes, num_tokens: int) -> Expected:
    """Every defect for some tokens; for fewer and for more the one that is hardest to see."""
    case = layer(scheme, sizes.num_experts, sizes.hidden, sizes.inter)
    given = inputs(num_tokens, sizes.num_experts, sizes.top_k, sizes.hidden)
    exact = ledger(case, given)
    names: tuple[str, ...] = ("last columns of up dropped",)
    if num_tokens == 37:
        names = DEFECTS if scheme is Scheme.PLAIN else (*DEFECTS, "scale of another expert")
    return Expected(given, exact, {name: distance(ledger(case, given, name), exact) for name in names})


def packed(scheme: Scheme, sizes: Sizes) -> tuple[ExpertWeights, ExpertWeights]:
    return layer(scheme, sizes.num_experts, sizes.hidden, sizes.inter).packed


def fill_with_nan(*tensors: Tensor | None) -> None:
    for t in tensors:
        if t is not None and t.dtype == torch.float8_e4m3fn:
            t.view(torch.uint8).fill_(0x7F)
        elif t is not None:
            t.fill_(torch.nan)


def up_and_down(
    given: Inputs, banks: tuple[ExpertWeights, ExpertWeights], tile: WgmmaTile, poisoned: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What is between the projections, and what they leave to the sum."""
    x, ids, weights, _ = given
    up, down = banks
    assert grouped_wgmma.takes(x, up, down, tile)
    top_k, pairs_per_token = ids.shape[1], ids.shape[1] + up.num_shared
    hidden_type = x.dtype if down.input_scale is None else torch.float8_e4m3fn
    hidden = torch.empty(len(ids) * pairs_per_token, up.codes.shape[1], dtype=hidden_type, device="cuda")
    parts, pieces = kernels.empty_parts(x, len(ids), top_k, down)
    if poisoned:
        fill_with_nan(hidden, parts, pieces)
    groups = kernels.align(ids, len(up.codes), tile.tokens, up.num_shared)
    grouped_wgmma.project(
        x, pairs_per_token, up, top_k, *groups, hidden, tile, out_scales=down.input_scale, options=SAFE
    )
    grouped_wgmma.project(
        hidden, 1, down, top_k, *groups, parts, tile, pair_weights=weights, pieces=pieces, options=SAFE
    )
    return hidden, parts, pieces


def run(
    given: Inputs,
    banks: tuple[ExpertWeights, ExpertWeights],
    tile: WgmmaTile,
    routed_scale: float = 2.5,
    poisoned: bool = True,
) -> Tensor:
    """The layer, with the shared part that is given where its pieces are no experts of the banks."""
    _, parts, pieces = up_and_down(given, banks, tile, poisoned)
    shared = given.shared if pieces is None else None
    return kernels.combine(parts, pieces, given.ids.shape[1], routed_scale, shared)


@every_tile
@every_size
def test_the_ledger_and_not_a_defect(scheme: Scheme, tile: WgmmaTile, sizes: Sizes) -> None:
    """Experts of no, of one and of more pairs than a tile holds."""
    banks = packed(scheme, sizes)
    for num_tokens in (5, 37, 100, 256):
        given, exact, defects = expected(scheme, sizes, num_tokens)
        counts = given.ids.flatten().bincount(minlength=sizes.num_experts)
        assert int(counts[1]) == 0
        assert num_tokens < 100 or int(counts[0]) > tile.tokens
        error = distance(run(given, banks, tile), exact)
        smallest = min(defects, key=lambda name: defects[name])
        print(f"{scheme.name} {sizes} T={num_tokens} {tile}: {error:.2e}, {smallest} {defects[smallest]:.2e}")
        assert defects[smallest] > GAP * error, (num_tokens, smallest)


class Joined(NamedTuple):
    banks: tuple[ExpertWeights, ExpertWeights]
    shared: SharedExpert


@cache
def joined(scheme: Scheme, sizes: Sizes) -> Joined:
    """The shared expert as two more."""
    case = layer(scheme, sizes.num_experts, sizes.hidden, sizes.inter)
    g = torch.Generator("cuda").manual_seed(SEED + 1)
    shared = shared_expert(g, scheme, sizes.hidden, sizes.inter)
    banks = device.banks(Experts(case.up, case.down, shared), ResidentWeights(torch.device("cuda")))
    assert [bank.num_shared for bank in banks] == [2, 2]
    return Joined(banks, shared)


@every_tile
@pytest.mark.parametrize("sizes", [REAL, SMALL[1], SMALL[3]], ids=lambda sizes: "-".join(map(str, sizes)))
def test_pieces_of_the_shared_expert(scheme: Scheme, tile: WgmmaTile, sizes: Sizes) -> None:
    """Which have every token, so more than one tile each."""
    case = layer(scheme, sizes.num_experts, sizes.hidden, sizes.inter)
    banks, shared = joined(scheme, sizes)
    first, second = values(shared.up), values(shared.down)
    is_first_piece = torch.arange(2 * sizes.inter, device="cuda") < sizes.inter
    for num_tokens in (5, 40):
        given = inputs(num_tokens, sizes.num_experts, sizes.top_k, sizes.hidden)
        between = bf16(bf16(product(given.x.double(), shared.up, first)).clamp(min=0) ** 2)
        whole = given._replace(shared=bf16(product(between, shared.down, second)))
        half = given._replace(shared=bf16(product(between * is_first_piece, shared.down, second)))
        exact = ledger(case, whole)
        error = distance(run(given, banks, tile), exact)
        defects = {"half of the shared part": distance(ledger(case, half), exact)}
        defects |= {
            name: distance(ledger(case, whole, name), exact)
            for name in ("last columns of up dropped", "last expert dropped", "weights of the next place")
        }
        smallest = min(defects, key=lambda name: defects[name])
        print(f"{scheme.name} {sizes} joined T={num_tokens} {tile}: {error:.2e}, {smallest} {defects[smallest]:.2e}")
        assert defects[smallest] > GAP * error, (num_tokens, smallest)


@pytest.mark.parametrize("sizes", [REAL, SMALL[3]], ids=lambda sizes: "-".join(map(str, sizes)))
@pytest.mark.parametrize("is_joined", [False, True], ids=["alone", "joined"])
def test_bits_of_fp8_do_not_depend_on_the_tile(sizes: Sizes, is_joined: bool) -> None:
    """Nor on neighbours, or on a pair's place in a tile."""
    banks = joined(Scheme.FP8, sizes).banks if is_joined else packed(Scheme.FP8, sizes)
    given, others = (inputs(count, sizes.num_experts, sizes.top_k, sizes.hidden) for count in (40, 101))
    tiles = [tile for scheme, tile in TILES if scheme is Scheme.FP8 and isinstance(tile, Fp8Tile)]
    assert len(tiles) > 1
    together = run(given, banks, tiles[0])
    assert bool(together.isfinite().all())
    for tile in tiles:
        assert torch.equal(run(given, banks, tile), together)
        for some in (slice(0, 1), slice(7, 15), slice(16, 40)):
            assert torch.equal(run(Inputs(*(t[some] for t in given)), banks, tile), together[some])
        for first in (1, 50, 101):  # so many others before these, the rest behind them
            mixed = Inputs(*(torch.cat((b[:first], a, b[first:])) for a, b in zip(given, others, strict=True)))
            assert torch.equal(run(mixed, banks, tile)[first : first + 40], together)


@every_tile
@pytest.mark.parametrize("num_tokens", [8, 40])
@pytest.mark.parametrize("is_joined", [False, True], ids=["alone", "joined"])
def test_runs_repeat_to_the_bit_and_a_graph_follows_its_inputs(
    scheme: Scheme, tile: WgmmaTile, num_tokens: int, is_joined: bool
) -> None:
    """Of a chain, where each kernel starts while the one before it is still running."""
    banks = joined(scheme, REAL).banks if is_joined else packed(scheme, REAL)
    given = Inputs(*(t.contiguous() for t in inputs(num_tokens, *REAL[:3])))

    def chain(wait: bool) -> Tensor:
        x = given.x
        for _ in range(4):
            x = run(given._replace(x=x), banks, tile, 0.1, poisoned=False)
            if wait:
                torch.cuda.synchronize()
        return x

    first = chain(wait=True)
    for _ in range(20):
        assert torch.equal(chain(wait=False), first)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain(wait=False)
    for more in range(1, 4):
        for old, new in zip(given, inputs(num_tokens + more, *REAL[:3]), strict=True):
            old.copy_(new[more:])
        graph.replay()
        once = result.clone()
        assert bool(once.isfinite().all())
        for _ in range(5):
            graph.replay()
            assert torch.equal(result, once)
        assert torch.equal(chain(wait=True), once)


def among_nan(rows: Tensor) -> Tensor:
    """The same rows, each with NaN before and behind it."""
    count, columns = rows.shape
    wide = torch.full((count + 2, columns + 80), torch.nan, dtype=torch.float32, device="cuda").to(rows.dtype)
    assert bool(wide.float().isnan().all())
    inner = wide[1:-1, 16 : 16 + columns]
    inner.copy_(rows)
    return inner


@every_tile
@pytest.mark.parametrize("sizes", SMALL, ids=lambda sizes: "-".join(map(str, sizes)))
def test_nothing_behind_a_row_is_read(scheme: Scheme, tile: WgmmaTile, sizes: Sizes) -> None:
    """Of x and of what is between the projections: not even to be multiplied with zeros."""
    banks = packed(scheme, sizes)
    for num_tokens in (5, 40):
        given = inputs(num_tokens, sizes.num_experts, sizes.top_k, sizes.hidden)
        hidden, parts, _ = up_and_down(given, banks, tile)
        assert bool(parts.isfinite().all())
        again, others, _ = up_and_down(given._replace(x=among_nan(given.x)), banks, tile)
        assert torch.equal(again.view(torch.uint8), hidden.view(torch.uint8))
        assert torch.equal(others, parts)
        groups = kernels.align(given.ids, sizes.num_experts, tile.tokens)
        torch.cuda.synchronize()  # down reads them before it waits: an up projection is between them otherwise
        result = torch.full_like(parts, torch.nan)
        grouped_wgmma.project(
            among_nan(hidden), 1, banks[1], sizes.top_k, *groups, result, tile, pair_weights=given.weights, options=SAFE
        )
        assert torch.equal(result, parts)


@every_scheme
def test_the_op_takes_them(scheme: Scheme) -> None:
    """With the bits of the two projections and the sum, where the table has a tile for so many pairs."""
    up, down = banks = packed(scheme, REAL)
    for most, tile in rows_mma.WGMMA_TILES[KERNELS[scheme]]:
        if tile is None:
            continue
        num_tokens = int(most * REAL.num_experts / REAL.top_k)
        given = inputs(num_tokens, *REAL[:3])
        assert rows_mma.takes_experts(given.x, up, down, num_tokens, REAL.top_k)
        assert rows_mma.experts_tile(given.x, up, down, num_tokens, REAL.top_k) == tile
        result = rows_mma.experts(*given[:3], up, down, 2.5, as_linears(given.shared))
        assert torch.equal(result, run(given, banks, tile))


def test_other_rows_and_sizes_are_not_taken() -> None:
    """Of which some bytes could not be copied, or x has no room."""
    tile = Fp8Tile(24, 6, 2)
    banks, hidden = packed(Scheme.FP8, SMALL[3]), SMALL[3].hidden
    whole = torch.zeros(8, hidden + 8, dtype=torch.bfloat16, device="cuda")
    apart = torch.zeros(8, hidden + 4, dtype=torch.bfloat16, device="cuda")
    assert grouped_wgmma.takes(whole[:, 8:], *banks, tile)
    assert not grouped_wgmma.takes(whole[:0, 8:], *banks, tile)
    assert not grouped_wgmma.takes(whole[:, 1:-7], *banks, tile)  # begins at two bytes
    assert not grouped_wgmma.takes(apart[:, :hidden], *banks, tile)
    assert grouped_wgmma.takes(apart[:1, :hidden], *banks, tile)
    assert not grouped_wgmma.takes(whole[:, 8:], *banks, replace(tile, x_buffers=100))
