"""Routed experts on a GPU against a float64 ledger: real and odd sizes, every tile of the tables, seeded defects.

The bound of each comparison lies between the error that was measured and that of the smallest defect, which has to be
several times larger. Fresh random inputs; outputs come out of memory that was full of NaN.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from hemiola.formats.weight import ExpertBank, Experts, Scheme, SharedExpert, Weight
from hemiola.kernels import experts as kernels
from hemiola.kernels import rows_mma
from hemiola.kernels.align import empty_rows
from hemiola.kernels.cuda import counter
from hemiola.kernels.experts import BF16, FP8, NVFP4, ExpertWeights, SharedLinears, experts
from hemiola.kernels.nvfp4 import REMAINDER, pack_words, words_per_row
from hemiola.kernels.quantize import finish
from hemiola.kernels.rms_norm import rms_norm
from hemiola.ops.device import moe_experts as device
from hemiola.ops.device import moe_route
from hemiola.ops.resident import ResidentWeights
from tests.support.weights import E2M1, SCHEMES

SEED = secrets.randbelow(2**31)
GAP = 4.0  # how many times larger the smallest defect's error has to be
KERNELS = {Scheme.PLAIN: BF16, Scheme.FP8: FP8, Scheme.NVFP4: NVFP4}
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=[s.value for s in SCHEMES])

# experts, top_k, in, inter, numbers of tokens. The first and the second have experts that nobody takes.
LIGHTNING = (24, 6, 2688, 1856, (1, 2, 4, 8, 65, 257, 600))
LATENT = (64, 22, 1024, 2688, (1, 3, 9, 130))
ODD = (7, 3, 80, 48, (1, 5, 17, 100, 900))


def random_weight(g: torch.Generator, name: str, scheme: Scheme, out_size: int, in_size: int, factor: float) -> Weight:
    size, shape = in_size**-0.5, (out_size, in_size)
    if scheme is Scheme.PLAIN:
        return Weight(name, shape, scheme, (torch.randn(shape, generator=g, device="cuda") * size).bfloat16())
    if scheme is Scheme.FP8:
        codes = (torch.randn(shape, generator=g, device="cuda") * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
        return Weight(name, shape, scheme, codes, None, size / 60 * factor, 0.011 * factor)
    data = torch.randint(0, 256, (out_size, in_size // 2), generator=g, device="cuda", dtype=torch.uint8)
    block_scale = torch.rand(out_size, in_size // 16, generator=g, device="cuda") * 56 + 4
    return Weight(name, shape, scheme, data, block_scale.to(torch.float8_e4m3fn), size / 90 * factor)


def values(weight: Weight) -> Tensor:
    """(out, in) float64: what the weight stands for, without the package."""
    if weight.scheme is not Scheme.NVFP4:
        return weight.data.double() * (1.0 if weight.scale is None else weight.scale)
    assert weight.block_scale is not None
    assert weight.scale is not None
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64, device="cuda")
    codes = torch.stack((weight.data & 15, weight.data >> 4), dim=-1).flatten(1)
    return table[codes.int()] * weight.block_scale.double().repeat_interleave(16, 1) * weight.scale


class Layer(NamedTuple):
    up: ExpertBank
    down: ExpertBank
    packed: tuple[ExpertWeights, ExpertWeights]


@cache
def layer(scheme: Scheme, num_experts: int, hidden: int, inter: int) -> Layer:
    g = torch.Generator("cuda").manual_seed(SEED)

    def bank(name: str, out_size: int, in_size: int) -> ExpertBank:
        weights = (
            random_weight(g, f"{name}.{e}", scheme, out_size, in_size, 1 + e / num_experts) for e in range(num_experts)
        )
        return ExpertBank(name, tuple(weights))

    up, down = bank("up", inter, hidden), bank("down", hidden, inter)
    resident = ResidentWeights(torch.device("cuda"))
    return Layer(up, down, device.banks(Experts(up, down, None), resident))


def shared_expert(g: torch.Generator, scheme: Scheme, hidden: int, inter: int) -> SharedExpert:
    """Twice as wide as the others."""
    return SharedExpert(
        random_weight(g, "shared.up", scheme, 2 * inter, hidden, 1.3),
        random_weight(g, "shared.down", scheme, hidden, 2 * inter, 0.8),
    )


class Inputs(NamedTuple):
    x: Tensor
    ids: Tensor
    weights: Tensor
    shared: Tensor


def inputs(num_tokens: int, num_experts: int, top_k: int, hidden: int) -> Inputs:
    """Expert 1 is never taken, and expert 0 by about half of the tokens."""
    g = torch.Generator("cuda").manual_seed(SEED + num_tokens)
    x = torch.randn(num_tokens, hidden + 16, generator=g, device="cuda").bfloat16()[:, 16:]
    order = torch.rand(num_tokens, num_experts, generator=g, device="cuda")
    order[:, 1], order[::2, 0] = 2.0, -1.0
    weights = torch.rand(num_tokens, top_k, generator=g, device="cuda") + 0.1
    shared = torch.randn(num_tokens, hidden, generator=g, device="cuda").bfloat16()
    return Inputs(x, order.argsort(1)[:, :top_k].int().contiguous(), weights, shared)


def bf16(value: Tensor) -> Tensor:
    return value.float().bfloat16().double()


def product(x: Tensor, weight: Weight, dense: Tensor) -> Tensor:
    if weight.scheme is Scheme.FP8:
        assert weight.input_scale is not None
        scale = torch.tensor(weight.input_scale, device="cuda")
        x = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * weight.input_scale
    return x @ dense.T


def ledger(case: Layer, given: Inputs, defect: str = "") -> Tensor:
    """The op with its roundings written out, float64; with one thing wrong as a kernel could do it."""
    x, ids, weights, shared = given
    num_tokens, top_k = ids.shape
    parts = torch.zeros(num_tokens, top_k, case.down.shape[0], dtype=torch.float64, device="cuda")
    for expert in ids.unique().tolist():
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        up, down = case.up[expert], case.down[expert]
        first, second = values(up), values(down)
        if defect == "last columns of up dropped":
            first[:, -16:] = 0
        if defect == "last columns of down dropped":
            second[:, -16:] = 0
        if defect == "swapped nibbles":
            first = first.view(len(first), -1, 2).flip(-1).reshape(first.shape)
        if defect == "scale of another expert" and up.scale is not None:
            other = case.up[(expert + 1) % len(case.up)].scale
            assert other is not None
            first = first * (other / up.scale)
        hidden = bf16(product(x[tokens].double(), up, first)).clamp(min=0)
        out = product(bf16(hidden**2), down, second)
        parts[tokens, places] = bf16(out * weights[tokens, places].double()[:, None])
    if defect == "last expert dropped":
        parts[:, -1] = 0
    if defect == "weights of the next place":
        parts = parts * (weights.roll(1, 1) / weights).double()[..., None]
    routed = bf16(bf16(parts.sum(1)) * (1.0 if defect == "no scale of the sum" else 2.5))
    return routed if defect == "no shared part" else bf16(routed + shared.double())


DEFECTS = (
    "last columns of up dropped",
    "last columns of down dropped",
    "swapped nibbles",
    "last expert dropped",
    "weights of the next place",
    "no scale of the sum",
    "no shared part",
)


def distance(result: Tensor, exact: Tensor) -> float:
    """In the norm; NaN is infinitely far."""
    error = ((result.double() - exact).norm() / exact.norm()).item()
    return error if error == error else float("inf")


def poison(given: Inputs, case: Layer) -> None:
    """Memory of the sizes that a layer allocates, full of NaN, for the allocator to hand out next."""
    pairs, inter = given.ids.numel(), case.up.shape[0]
    for shape in ((pairs, inter), (pairs, len(case.down.weights[0].data)), tuple(given.shared.shape)):
        torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda")
        torch.full(shape, 0x7F, dtype=torch.uint8, device="cuda")


def run(case: Layer, given: Inputs, invariant: bool = False) -> Tensor:
    poison(given, case)
    x, ids, weights, shared = given
    return experts(x, ids, weights, *case.packed, 2.5, shared, invariant=invariant)


def as_linears(shared: Tensor) -> SharedLinears:
    """What makes this shared part."""
    return SharedLinears(shared.clone, lambda hidden, early: hidden, beside=False)


def results(case: Layer, given: Inputs) -> list[Tensor]:
    """What every way through the layer makes of it."""
    found = [run(case, given, invariant) for invariant in (False, True)]
    if rows_mma.takes_experts(given.x, *case.packed, *given.ids.shape):
        poison(given, case)
        found.append(rows_mma.experts(*given[:3], *case.packed, 2.5, as_linears(given.shared)))
    return found


@every_scheme
@pytest.mark.parametrize("geometry", [LIGHTNING, LATENT, ODD], ids=["lightning", "latent", "odd"])
def test_the_ledger_and_not_a_defect(scheme: Scheme, geometry: tuple[int, int, int, int, tuple[int, ...]]) -> None:
    num_experts, top_k, hidden, inter, counts = geometry
    case = layer(scheme, num_experts, hidden, inter)
    names = DEFECTS if scheme is Scheme.PLAIN else (*DEFECTS, "scale of another expert")
    for num_tokens in counts:
        given = inputs(num_tokens, num_experts, top_k, hidden)
        exact = ledger(case, given)
        error = max(distance(result, exact) for result in results(case, given))
        if num_tokens > 20:  # the same tiles have been separated from every defect by fewer tokens
            some = Inputs(*(t[:20] for t in given))
            errors = {name: distance(ledger(case, some, name), exact[:20]) for name in names}
        else:
            errors = {name: distance(ledger(case, given, name), exact) for name in names}
        smallest = min(errors, key=lambda name: errors[name])
        print(f"{scheme.name} {geometry[:4]} T={num_tokens}: {error:.2e}, {smallest} {errors[smallest]:.2e}")
        assert errors[smallest] > GAP * error, (num_tokens, smallest)


@every_scheme
def test_every_tile_of_the_tables(scheme: Scheme) -> None:
    """Also where the table would take another one, and each pair as a tile of its own."""
    num_experts, top_k, hidden, inter, _ = LIGHTNING
    case = layer(scheme, num_experts, hidden, inter)
    given = inputs(37, num_experts, top_k, hidden)
    exact = ledger(case, given)
    arguments = (*given[:3], *case.packed, 2.5, given.shared)
    for _, tiles in kernels.GROUP_TILES[KERNELS[scheme]]:
        for single in (False, True):
            poison(given, case)
            error = distance(kernels.experts_by_group(*arguments, tiles, tiles, single=single), exact)
            print(f"{scheme.name} {tiles} single={single}: {error:.2e}")
            assert GAP * error < distance(ledger(case, given, "last columns of up dropped"), exact)


@every_scheme
def test_every_tile_of_the_cuda_tables(scheme: Scheme) -> None:
    """Also where the table would take another one: experts of no, of one and of more pairs than a tile holds."""
    for num_experts, top_k, hidden, inter, _ in (LIGHTNING, ODD):
        case, name = layer(scheme, num_experts, hidden, inter), KERNELS[scheme]
        up, down = case.packed
        for num_tokens in (1, 37, 130):
            given = inputs(num_tokens, num_experts, top_k, hidden)
            exact = ledger(case, given)
            smallest = distance(ledger(case, given, "last columns of up dropped"), exact)
            x, ids, weights, shared = given
            for tile, down_tile in rows_mma.DIRECT[name]:
                poison(given, case)
                between = torch.empty(ids.numel(), up.codes.shape[1], dtype=hidden_type(scheme), device="cuda")
                rows_mma.project(x, top_k, up, top_k, ids, between, tile, out_scales=down.input_scale)
                result = rows_mma.down(between, down, ids, weights, shared, 2.5, hidden, down_tile)
                error = distance(result, exact)
                print(f"{scheme.name} T={num_tokens} {tile} {down_tile}: {error:.2e}")
                assert GAP * error < smallest
            for _, tile in rows_mma.GROUP_TILES[name]:
                groups = kernels.align(ids, num_experts, tile.tokens)
                between = torch.empty(ids.numel(), up.codes.shape[1], dtype=hidden_type(scheme), device="cuda")
                rows_mma.project_groups(x, top_k, up, top_k, *groups, between, tile, out_scales=down.input_scale)
                parts = torch.full((ids.numel(), hidden), torch.nan, dtype=x.dtype, device="cuda")
                rows_mma.project_groups(between, 1, down, top_k, *groups, parts, tile, pair_weights=weights)
                error = distance(kernels.combine(parts, None, top_k, 2.5, shared), exact)
                print(f"{scheme.name} T={num_tokens} {tile}: {error:.2e}")
                assert GAP * error < smallest


@every_scheme
@pytest.mark.parametrize("geometry", [LIGHTNING, ODD], ids=["lightning", "odd"])
def test_the_shared_expert_as_two_more(scheme: Scheme, geometry: tuple[int, int, int, int, tuple[int, ...]]) -> None:
    """By every way that the number of tokens takes, and invariant; a token's bits are then its own."""
    num_experts, top_k, hidden, inter, counts = geometry
    case = layer(scheme, num_experts, hidden, inter)
    shared = shared_expert(torch.Generator("cuda").manual_seed(SEED + 1), scheme, hidden, inter)
    resident = ResidentWeights(torch.device("cuda"))

    def run(given: Inputs, invariant: bool) -> Tensor:
        poison(given, case)
        x, ids, weights, _ = given
        arguments = (x, ids, weights, case.up, case.down, 2.5, shared)
        assert device.unsupported(*arguments, joined=True) is None
        return device.run(*arguments, joined=True, resident=resident, invariant=invariant)

    for num_tokens in (*counts, 1500):
        given = inputs(num_tokens, num_experts, top_k, hidden)
        first, second = values(shared.up), values(shared.down)
        between = bf16(bf16(product(given.x.double(), shared.up, first)).clamp(min=0) ** 2)
        whole = given._replace(shared=bf16(product(between, shared.down, second)))
        half = given._replace(
            shared=bf16(product(between * (torch.arange(2 * inter, device="cuda") < inter), shared.down, second))
        )
        exact = ledger(case, whole)
        results = [run(given, invariant) for invariant in (False, True)]
        error = max(distance(result, exact) for result in results)
        errors = {"half of the shared part": distance(ledger(case, half), exact)}
        if num_tokens <= 20:
            errors |= {name: distance(ledger(case, whole, name), exact) for name in DEFECTS}
        smallest = min(errors, key=lambda name: errors[name])
        print(f"{scheme.name} {geometry[:4]} joined T={num_tokens}: {error:.2e}, {smallest} {errors[smallest]:.2e}")
        assert errors[smallest] > GAP * error, (num_tokens, smallest)
        some = slice(num_tokens // 3, num_tokens // 3 + 5)
        assert torch.equal(run(Inputs(*(t[some] for t in given)), True), results[1][some])


@every_scheme
@pytest.mark.parametrize("num_tokens", [20, 33, 64, 130])
def test_a_shared_part_of_linears_runs_beside_its_neighbours(scheme: Scheme, num_tokens: int) -> None:
    """Norm, router and experts, replayed as a graph with new inputs, give the bits of one kernel after the other: the
    first of the shared expert's products begins while the router runs, pairs are grouped beside it or the second one,
    and that may run beside the routed experts' up projection."""
    num_experts, top_k, hidden, inter, _ = LIGHTNING
    case = layer(scheme, num_experts, hidden, inter)
    g = torch.Generator("cuda").manual_seed(SEED + 2)
    shared = shared_expert(g, scheme, hidden, inter)
    gate, bias = random_weight(g, "gate", Scheme.PLAIN, num_experts, hidden, 1.0), torch.zeros(num_experts).cuda()
    norm_weight, resident = torch.ones(hidden, dtype=torch.bfloat16).cuda(), ResidentWeights(torch.device("cuda"))

    def step(x: Tensor, residual: Tensor, between: Callable[[], None]) -> tuple[Tensor, Tensor]:
        normed, total = rms_norm(x, residual, norm_weight, 1e-5)
        between()
        ids, weights, _ = moe_route.run(
            normed, gate, torch.bfloat16, bias, top_k, 1, 1, True, resident=resident, invariant=False
        )
        between()
        arguments = (normed, ids, weights, case.up, case.down, 2.5, shared)
        result = device.run(*arguments, joined=True, resident=resident, invariant=False)
        between()
        return result, total

    x, residual = (torch.randn(num_tokens, hidden, generator=g, device="cuda").bfloat16() for _ in range(2))

    def steps(between: Callable[[], None]) -> Tensor:
        result, total = x, residual
        for _ in range(4):
            result, total = step(result, total, between)
        return result

    steps(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = steps(lambda: None)
    for _ in range(20):
        x.copy_(torch.randn(num_tokens, hidden, generator=g, device="cuda"))
        residual.copy_(torch.randn(num_tokens, hidden, generator=g, device="cuda"))
        graph.replay()
        assert torch.equal(replayed, steps(torch.cuda.synchronize))


def hidden_type(scheme: Scheme) -> torch.dtype:
    return torch.float8_e4m3fn if scheme is Scheme.FP8 else torch.bfloat16


def test_quantised_activations_saturate_and_keep_nan() -> None:
    """Scales of any size, one expert each, through the CUDA kernel and Triton's: the same codes of x, seen through the
    unit matrix."""
    values = torch.tensor([0.0, 1e-30, 0.3, -7.0, 447.0, 464.0, -1e4, 3e38, torch.inf, -torch.inf, torch.nan, 2.0])
    x = torch.zeros(12, 64, dtype=torch.bfloat16, device="cuda")
    x[:, 5] = values.bfloat16()
    scales = torch.tensor([1.0, 0.011, 3e-38, 1e30, 0.7], device="cuda")
    unit = torch.eye(64, device="cuda").to(torch.float8_e4m3fn).expand(5, 64, 64).contiguous()
    ones = torch.ones(5, device="cuda")
    up = ExpertWeights(kernels.tiled_codes(unit), None, ones, scales)
    for expert, scale in enumerate(scales):
        ids = torch.full((12, 1), expert, dtype=torch.int32, device="cuda")
        expected = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float().clamp(min=0).bfloat16()
        expected = (expected.float() ** 2).bfloat16()
        result = torch.empty(12, 64, dtype=torch.bfloat16, device="cuda")
        rows_mma.project(x, 1, up, 1, ids, result, rows_mma.RowsTile(8, 2, 2, 2))
        column = result[:, 5]
        assert torch.equal(column.isnan(), expected[:, 5].isnan())
        assert torch.equal(column.nan_to_num(7.0), expected[:, 5].nan_to_num(7.0))


def test_codes_of_every_number() -> None:
    """Quotients without a division are what divisions would give: every bfloat16 number, and its squared ReLU."""
    x = torch.arange(1 << 16, device="cuda", dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(64, 1024)
    positive = torch.where(x < 0, 0.0, x.float())
    squared = (positive * positive).bfloat16()
    assert_same(finish(x, relu_squared=True), squared)
    for scale in (1.0, 0.011, 1e30, 0.7, 0.75, 6 / 448, 24 / 448, 1 / 3, 7.0, 0.875):
        for relu_squared, y in ((False, x), (True, squared)):
            expected = (y.float() / torch.tensor(scale, device="cuda")).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert_same(finish(x, relu_squared, scale), expected)


def assert_same(result: Tensor, expected: Tensor) -> None:
    assert result.dtype == expected.dtype
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.float().nan_to_num(7.0, 9.0), expected.float().nan_to_num(7.0, 9.0))


def test_one_input_scale_changes_no_bit() -> None:
    """Inputs quantised once a token or once a pair, for few pairs and for many."""
    num_experts, top_k, hidden, inter, _ = LIGHTNING
    up, down = layer(Scheme.FP8, num_experts, hidden, inter).packed
    up = up._replace(input_scale=torch.full((num_experts,), 0.013, device="cuda"))
    for num_tokens in (1, 17, 300, 1500):
        given = inputs(num_tokens, num_experts, top_k, hidden)
        both = [
            experts(given.x, given.ids, given.weights, bank, down, 2.5, given.shared)
            for bank in (up, up._replace(one_input_scale=True))
        ]
        assert torch.equal(*both)


@every_scheme
def test_invariant_rows_do_not_depend_on_their_neighbours(scheme: Scheme) -> None:
    for num_experts, top_k, hidden, inter, _ in (LIGHTNING, ODD):
        case = layer(scheme, num_experts, hidden, inter)
        given = inputs(300, num_experts, top_k, hidden)
        together = run(case, given, invariant=True)
        for some in (slice(0, 1), slice(7, 15), slice(100, 164), slice(50, 300)):
            assert torch.equal(run(case, Inputs(*(t[some] for t in given)), invariant=True), together[some])


@every_scheme
def test_runs_repeat_to_the_bit_and_graphs_follow_their_inputs(scheme: Scheme) -> None:
    num_experts, top_k, hidden, inter, _ = LIGHTNING
    case = layer(scheme, num_experts, hidden, inter)
    for num_tokens in (1, 8, 64):
        given = Inputs(*(t.contiguous() for t in inputs(num_tokens, num_experts, top_k, hidden)))
        chained(case, given.x, given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            # A chain: each layer starts while the one before it is still running.
            x = given.x
            for _ in range(2):
                x = chained(case, x, given)
        for old, new in zip(given, inputs(num_tokens + 1, num_experts, top_k, hidden), strict=True):
            old.copy_(new[1:])
        graph.replay()
        expected = given.x
        for _ in range(2):
            expected = chained(case, expected, given)
            torch.cuda.synchronize()
        assert torch.equal(x, expected)
        assert not any(bool(counter(x.device, name).any()) for name in ("up", "down")), "as the next launch wants them"


def chained(case: Layer, x: Tensor, given: Inputs) -> Tensor:
    """Both kinds of kernels one after the other."""
    x = experts(x, given.ids, given.weights, *case.packed, 0.1, given.shared)
    return rows_mma.experts(x, given.ids, given.weights, *case.packed, 0.1, as_linears(given.shared))


def test_pairs_are_grouped_by_expert() -> None:
    g = torch.Generator("cuda").manual_seed(SEED)
    for num_tokens, num_experts, top_k, tile in (
        (1, 128, 6, 16), (40, 7, 3, 8), (256, 128, 6, 24), (256, 512, 22, 16), (8192, 128, 6, 128),
    ):  # fmt: skip
        order = torch.rand(num_tokens, num_experts, generator=g, device="cuda")
        ids = order.argsort(1)[:, :top_k].int().contiguous()
        check_groups(ids, num_experts, tile)


@pytest.mark.parametrize("columns", [2688, 1856, 24])
def test_rows_are_brought_into_the_order_of_products(columns: int) -> None:
    """Each column where the kernel's documentation says, zeros behind the last; groups are what they are without."""
    g = torch.Generator("cuda").manual_seed(SEED)
    ids = torch.rand(37, 128, generator=g, device="cuda").argsort(1)[:, :6].int().contiguous()
    whole = torch.randn(37, columns + 8, generator=g, device="cuda").bfloat16()
    x = whole[:, :columns]
    groups, rows = kernels.empty_groups(ids, 130, 24, 2), empty_rows(x)
    kernels.fill_groups(groups, ids, 130, 24, 2, x, rows)
    assert rows.shape == (37, -(-columns // 128) * 128)
    for mine, others in zip(groups[:2], kernels.align(ids, 130, 24, 2)[:2], strict=True):
        used = int(groups.num_tiles) * (24 if mine is groups.sorted_pairs else 1)
        assert torch.equal(mine[:used], others[:used])
    expected = torch.zeros_like(rows)
    for c in range(columns):
        lane, word, j = c // 64 % 2 * 2 + c % 8 // 4, c % 4, c // 8 % 8
        expected[:, c // 128 * 128 + (word * 4 + lane) * 8 + j % 4 * 2 + j // 4] = x[:, c]
    assert torch.equal(rows, expected)


def check_groups(ids: Tensor, num_experts: int, tile: int) -> None:
    """Pairs by expert, in their order, each expert's in tiles of its own."""
    groups = kernels.align(ids, num_experts, tile)
    tiles = (ids.flatten().bincount(minlength=num_experts) + tile - 1) // tile
    used = int(tiles.sum())
    assert int(groups.num_tiles) == used
    owners = torch.arange(num_experts, device=ids.device).repeat_interleave(tiles)
    assert torch.equal(groups.tile_experts[:used].long(), owners)
    pairs = groups.sorted_pairs[: used * tile].long()
    real = pairs[pairs < ids.numel()]
    assert torch.equal(real, ids.flatten().sort(stable=True).indices)
    assert torch.equal(ids.flatten()[real].long(), owners.repeat_interleave(tile)[pairs < ids.numel()])


def test_every_code_with_every_scale() -> None:
    """Packed arithmetic's decoding: 16 codes with the 254 scales that are numbers, to the bit, by every kernel."""
    codes = torch.arange(16, dtype=torch.uint8)
    data = (codes[0::2] | codes[1::2] << 4).repeat(16, 16).cuda()
    numbers = [code for code in range(256) if code & 0x7F != 0x7F]
    scales = torch.tensor([*numbers, 0, 0], dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn).view(16, 16)
    data, scales = data.repeat(16, 1), scales.view(torch.uint8).repeat(16, 1).view(torch.float8_e4m3fn)
    dense = values(Weight("w", (256, 256), Scheme.NVFP4, data, scales, 1.0))
    words = torch.empty(1, 256, words_per_row(256), dtype=torch.int32, device="cuda")
    packed_scales = torch.empty(1, 256, words_per_row(256) // 8, dtype=torch.int32, device="cuda")
    pack_words(data, scales, words[0], packed_scales[0])
    down = ExpertWeights(words, packed_scales, torch.full((1,), REMAINDER, device="cuda"), None)
    # One token a column: up makes the unit vectors.
    unit = torch.eye(256, dtype=torch.bfloat16, device="cuda")[None]
    up = ExpertWeights(kernels.tiled_codes(unit), None, None, None)
    x = torch.eye(256, dtype=torch.bfloat16, device="cuda")
    ids, weights = torch.zeros(256, 1, dtype=torch.int32, device="cuda"), torch.ones(256, 1, device="cuda")
    expected = dense.T
    row_tiles = kernels.ROW_TILES[NVFP4]
    assert torch.equal(kernels.experts_by_row(x, ids, weights, up, down, 1.0, None, *row_tiles).double(), expected)
    for _, tiles in kernels.GROUP_TILES[NVFP4]:
        result = kernels.experts_by_group(x, ids, weights, up, down, 1.0, None, tiles, tiles)
        assert torch.equal(result.double(), expected)
