"""Routed experts' kernels in the interpreter: every scheme, every way through a layer, sizes that fill no tile."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from hemiola.formats.weight import ExpertBank, Experts, Scheme, SharedExpert, Weight
from hemiola.kernels import experts as kernels
from hemiola.kernels import nvfp4
from hemiola.kernels.experts import GroupTiles, RowTiles
from hemiola.ops.device import moe_experts as device
from hemiola.ops.resident import ResidentWeights
from tests.support import weights as formats
from tests.support.numerics import assert_ledger, bf16, generator, randn, uniform
from tests.support.weights import SCHEMES, e4m3_nearest, random_weight

NUM_EXPERTS = 5
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=[s.value for s in SCHEMES])


@pytest.fixture(autouse=True)
def many_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the interpreter takes for a program hardly depends on its size; packing as it is: test_nvfp4.py."""
    monkeypatch.setattr(nvfp4, "PACKED_ROWS", 64)


def banks(g: torch.Generator, up: Scheme, down: Scheme, hidden: int, inter: int) -> tuple[ExpertBank, ExpertBank]:
    """Each expert with scales of its own."""

    def bank(name: str, scheme: Scheme, out_size: int, in_size: int) -> ExpertBank:
        weights = [random_weight(g, f"{name}.{e}", scheme, out_size, in_size) for e in range(NUM_EXPERTS)]
        return ExpertBank(name, tuple(scaled(w, 1 + e / 4) for e, w in enumerate(weights)))

    return bank("up", up, inter, hidden), bank("down", down, hidden, inter)


def scaled(weight: Weight, factor: float) -> Weight:
    if weight.scale is None:
        return weight
    inner = None if weight.input_scale is None else weight.input_scale * factor
    return dataclasses.replace(weight, scale=weight.scale * factor, input_scale=inner)


def packed_on_cpu(up: ExpertBank, down: ExpertBank) -> tuple[kernels.ExpertWeights, kernels.ExpertWeights]:
    resident = ResidentWeights(torch.device("cpu"))
    return device.banks(Experts(up, down, None), resident)


class Layer(NamedTuple):
    """joined: the banks with the pieces of `shared`."""

    packed: tuple[kernels.ExpertWeights, kernels.ExpertWeights]
    values: Values
    joined: tuple[kernels.ExpertWeights, kernels.ExpertWeights]
    shared: SharedExpert


@cache
def layer(up: Scheme, down: Scheme, hidden: int, inter: int) -> Layer:
    g = generator(hidden)
    weights = banks(g, up, down, hidden, inter)
    shared = SharedExpert(
        scaled(random_weight(g, "shared.up", up, 2 * inter, hidden), 1.5),
        scaled(random_weight(g, "shared.down", down, hidden, 2 * inter), 0.7),
    )
    joined = device.banks(Experts(*weights, shared), ResidentWeights(torch.device("cpu")))
    assert [bank.num_shared for bank in joined] == [2, 2]
    return Layer(packed_on_cpu(*weights), Values(*weights), joined, shared)


def shared_part(x: Tensor, shared: SharedExpert, num_pieces: int = 2) -> Tensor:
    """What the shared expert makes of x, bfloat16; of its first pieces alone."""
    up, down = ((formats.values(w), w.input_scale if w.scheme is Scheme.FP8 else None) for w in shared)
    rows = []
    for token in x.double():
        hidden = bf16(bf16(product(token, *up)).clamp(min=0) ** 2)
        hidden[len(hidden) // 2 * num_pieces :] = 0
        rows.append(bf16(product(hidden, *down)))
    return torch.stack(rows).bfloat16()


def routing(g: torch.Generator, num_tokens: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Expert 1 is never taken."""
    choices = torch.tensor([e for e in range(NUM_EXPERTS) if e != 1])
    picks = [choices[torch.randperm(len(choices), generator=g)[:top_k]] for _ in range(num_tokens)]
    return torch.stack(picks).int(), uniform(g, 0.1, 1.0, num_tokens, top_k)


class Values:
    """What the weights of two banks stand for, decoded once."""

    def __init__(self, up: ExpertBank, down: ExpertBank) -> None:
        self.up = [(formats.values(w), w.input_scale if w.scheme is Scheme.FP8 else None) for w in up]
        self.down = [(formats.values(w), w.input_scale if w.scheme is Scheme.FP8 else None) for w in down]

    def ledger(self, x: Tensor, ids: Tensor, weights: Tensor, scale: float, shared: Tensor | None) -> Tensor:
        """The op with its roundings written out, float64."""
        routed = torch.zeros(x.shape, dtype=torch.float64)
        for token in range(x.shape[0]):
            for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
                hidden = bf16(product(x[token].double(), *self.up[expert])).clamp(min=0)
                routed[token] += bf16(product(bf16(hidden**2), *self.down[expert]) * weight)
        routed = bf16(bf16(routed) * scale)
        return routed if shared is None else bf16(routed + shared.double())


def product(x: Tensor, weight: Tensor, input_scale: float | None) -> Tensor:
    if input_scale is not None:
        x = e4m3_nearest((x.float() / torch.tensor(input_scale)).double()) * input_scale
    return weight @ x


@pytest.mark.parametrize("num_tokens", [3, kernels.QUANTISE_TOGETHER])
@pytest.mark.parametrize("num_shared", [0, 2])
def test_quantised_inputs(num_tokens: int, num_shared: int) -> None:
    """A row a pair; where all experts have one scale, a row a token."""
    g = generator(num_tokens)
    x, (ids, _) = randn(g, num_tokens, 48).bfloat16(), routing(g, num_tokens, 3)
    scales = torch.tensor([0.011, 0.7, 0.02, 0.3, 1.0, 0.05, 0.06][: NUM_EXPERTS + num_shared])
    codes = kernels.empty_codes(len(scales), 16, 48, torch.float8_e4m3fn, "cpu")
    pieces = torch.arange(num_shared).int() + NUM_EXPERTS
    experts = torch.cat([ids, pieces.expand(num_tokens, -1)], 1).long()

    def check(scales: Tensor, one: bool, rows: Tensor) -> None:
        bank = kernels.ExpertWeights(codes, None, scales, scales, num_shared, one)
        out = kernels.quantise_pairs(x, ids, bank)
        expected = (x.float()[:, None] / rows[:, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(out.view(torch.uint8), expected.flatten(0, 1).view(torch.uint8))

    check(scales, False, scales[experts])
    scales[:NUM_EXPERTS] = 0.02
    check(scales, True, scales[experts] if num_shared else scales[:1].expand(num_tokens, 1))


def test_one_input_scale() -> None:
    """Of the routing's experts; pieces may have another."""
    g = generator(3)
    weights = banks(g, Scheme.FP8, Scheme.FP8, 32, 16)
    up, down = (ExpertBank(b.name, tuple(dataclasses.replace(w, input_scale=0.5) for w in b)) for b in weights)
    shared = SharedExpert(random_weight(g, "s.up", Scheme.FP8, 32, 32), random_weight(g, "s.down", Scheme.FP8, 32, 32))
    assert [bank.one_input_scale for bank in packed_on_cpu(*weights)] == [False, False]
    assert [bank.one_input_scale for bank in packed_on_cpu(up, down)] == [True, True]
    joined = device.banks(Experts(up, down, shared), ResidentWeights(torch.device("cpu")))
    assert [(bank.one_input_scale, bank.num_shared) for bank in joined] == [(True, 2), (True, 2)]


ROW_TILES = RowTiles(16, 32, 1, 1), RowTiles(8, 64, 1, 1)
GROUPED = GroupTiles(16, 16, 16, 1, 1), GroupTiles(32, 32, 32, 1, 1)


@every_scheme
@pytest.mark.parametrize("path", ["rows", "groups", "single"])
@pytest.mark.parametrize("is_joined", [False, True], ids=["beside", "joined"])
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "inter", "top_k"),
    [(1, 64, 32, 2), (3, 80, 48, 3), (4, 144, 80, 1)],  # columns that fill no piece of 64 bytes in the last two
)
def test_every_path_keeps_the_ledger(
    scheme: Scheme, path: str, is_joined: bool, num_tokens: int, hidden: int, inter: int, top_k: int
) -> None:
    g = generator(num_tokens)
    packed, values, joined, shared_expert = layer(scheme, scheme, hidden, inter)
    wide = randn(g, num_tokens, hidden + 16, dtype=torch.bfloat16)
    x, shared = wide[:, 16:], randn(g, num_tokens, hidden, dtype=torch.bfloat16)
    ids, weights = routing(g, num_tokens, top_k)
    banks, given = (joined, None) if is_joined else (packed, shared)
    if path == "rows":
        result = kernels.experts_by_row(x, ids, weights, *banks, 2.5, given, *ROW_TILES)
    else:
        result = kernels.experts_by_group(x, ids, weights, *banks, 2.5, given, *GROUPED, single=path == "single")
    if is_joined:
        shared = shared_part(x, shared_expert)
    ledger = values.ledger
    other_ids = torch.where(ids == 0, 2, 0)
    wrong = {
        "half of the shared part": ledger(x, ids, weights, 2.5, shared_part(x, shared_expert, 1)),
        "no routed scale": ledger(x, ids, weights, 1.0, shared),
        "no shared part": ledger(x, ids, weights, 2.5, None),
        "other experts": ledger(x, other_ids, weights, 2.5, shared),
        "equal weights": ledger(x, ids, torch.full_like(weights, 0.5), 2.5, shared),
    }
    assert_ledger(result, ledger(x, ids, weights, 2.5, shared), wrong)


@pytest.mark.parametrize("up_scheme", SCHEMES, ids=[f"up-{s.value}" for s in SCHEMES])
@pytest.mark.parametrize("down_scheme", SCHEMES, ids=[f"down-{s.value}" for s in SCHEMES])
def test_schemes_of_up_and_down_may_differ(up_scheme: Scheme, down_scheme: Scheme) -> None:
    g = generator(20)
    packed, values, *_ = layer(up_scheme, down_scheme, 64, 32)
    x, (ids, weights) = randn(g, 2, 64, dtype=torch.bfloat16), routing(g, 2, 2)
    expected = values.ledger(x, ids, weights, 1.0, None)
    assert_ledger(kernels.experts_by_row(x, ids, weights, *packed, 1.0, None, *ROW_TILES), expected, {})
    assert_ledger(kernels.experts_by_group(x, ids, weights, *packed, 1.0, None, *GROUPED), expected, {})


@every_scheme
def test_negative_preactivations_give_exact_zeros(scheme: Scheme) -> None:
    g = generator(15)
    up, down = banks(g, scheme, scheme, 64, 32)
    ones = {
        Scheme.PLAIN: torch.ones(32, 64, dtype=torch.bfloat16),
        Scheme.FP8: torch.ones(32, 64).to(torch.float8_e4m3fn),
        Scheme.NVFP4: torch.full((32, 32), 0x22, dtype=torch.uint8),  # code 2 is 1.0
    }[scheme]
    up = ExpertBank("up", (dataclasses.replace(up[0], data=ones), *up.weights[1:]))
    x = randn(g, 4, 64, dtype=torch.bfloat16).abs() + 0.01
    x[::2] *= -1
    ids, weights = torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1)
    packed = packed_on_cpu(up, down)
    for result in (
        kernels.experts_by_row(x, ids, weights, *packed, 1.0, None, *ROW_TILES),
        kernels.experts_by_group(x, ids, weights, *packed, 1.0, None, *GROUPED),
    ):
        assert result[::2].eq(0).all()
        assert result[1::2].ne(0).any(1).all()


def test_the_sum_over_experts_is_float32() -> None:
    """One large and many small expert outputs: a bfloat16 accumulator would swallow the small ones."""
    codes = torch.ones(8, 16, 16, dtype=torch.bfloat16) / 16
    bank = kernels.ExpertWeights(kernels.tiled_codes(codes), None, None, None)
    x, ids = torch.ones(1, 16, dtype=torch.bfloat16), torch.arange(8, dtype=torch.int32)[None]
    weights = torch.tensor([[256.0] + [0.75] * 7])
    for result in (
        kernels.experts_by_row(x, ids, weights, bank, bank, 1.0, None, *ROW_TILES),
        kernels.experts_by_group(x, ids, weights, bank, bank, 1.0, None, *GROUPED),
    ):
        assert result.eq(262.0).all()  # 261.25


@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize("num_shared", [0, 2])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 5, 5), (40, 6, 3), (150, 40, 2)])
def test_pairs_are_grouped_by_expert(
    num_tokens: int, num_experts: int, top_k: int, num_shared: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "ALIGN_CHUNK", 128)
    g = generator(num_tokens)
    ids = torch.stack([torch.randperm(num_experts, generator=g)[:top_k] for _ in range(num_tokens)]).int()
    ids[ids == 3] = 0  # nobody takes expert 3; expert 0 may come twice in a token
    groups = kernels.align(ids, num_experts + num_shared, tile, num_shared)
    pieces = torch.arange(num_experts, num_experts + num_shared).expand(num_tokens, -1)
    taken = torch.cat((ids, pieces), 1).flatten()
    sorted_pairs: list[int] = []
    tile_experts: list[int] = []
    for expert in range(num_experts + num_shared):
        pairs = (taken == expert).nonzero().flatten().tolist()
        tiles = -(-len(pairs) // tile)
        sorted_pairs += pairs + [taken.numel()] * (tiles * tile - len(pairs))
        tile_experts += [expert] * tiles
    assert groups.num_tiles.tolist() == [len(tile_experts)]
    assert groups.tile_experts[: len(tile_experts)].tolist() == tile_experts
    assert groups.sorted_pairs[: len(sorted_pairs)].tolist() == sorted_pairs


@every_scheme
def test_invariant_rows_do_not_depend_on_their_neighbours(scheme: Scheme) -> None:
    g = generator(18)
    packed = layer(scheme, scheme, 64, 32).packed
    x, (ids, weights) = randn(g, 24, 64, dtype=torch.bfloat16), routing(g, 24, 2)
    together = kernels.experts(x, ids, weights, *packed, 2.5, x, invariant=True)
    alone = kernels.experts(x[5:6], ids[5:6], weights[5:6], *packed, 2.5, x[5:6], invariant=True)
    assert torch.equal(alone[0], together[5])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (24, 72), (80, 208)])
def test_weights_lie_in_tiles(dtype: torch.dtype, rows: int, columns: int) -> None:
    weight = randn(generator(rows), rows, columns).to(dtype)
    (tiles,) = kernels.tiled_codes(weight[None])
    piece = 64 // weight.element_size()
    size, memory = tiles.shape[1], tiles.flatten().float()
    assert tiles.shape == (-(-rows // 16) * 16, -(-columns // piece) * piece)
    for row in range(len(tiles)):
        for first in range(0, size, piece):
            at = (row // 16 * (size // piece) + first // piece) * 16 * piece + row % 16 * piece
            expected = torch.zeros(piece)
            if row < rows:
                there = weight[row, first : first + piece].float()
                expected[: len(there)] = there
            assert torch.equal(memory[at : at + piece], expected)


def test_no_tokens() -> None:
    packed = layer(Scheme.PLAIN, Scheme.PLAIN, 64, 32).packed
    x, ids, weights = torch.empty(0, 64).bfloat16(), torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2)
    for invariant in (False, True):
        assert kernels.experts(x, ids, weights, *packed, 1.0, None, invariant=invariant).shape == (0, 64)


def test_rows_that_are_no_whole_tiles_are_refused_by_name() -> None:
    g = generator(1)
    up, down = banks(g, Scheme.NVFP4, Scheme.PLAIN, 32, 24)
    x, (ids, weights) = randn(g, 2, 32, dtype=torch.bfloat16), routing(g, 2, 2)
    assert (
        device.unsupported(x, ids, weights, up, down, joined=False)
        == "NVFP4 weights come in tiles of 16 rows: up has 24"
    )
    resident = ResidentWeights(torch.device("cpu"))
    device.prepare(Experts(up, down, None), resident, joined=False)
    assert not resident.built
    device.prepare(Experts(down, down, None), resident, joined=False)
    assert resident.built


@pytest.mark.parametrize("variant", ["joined", "beside"])
def test_one_variant_is_for_a_layer(variant: str) -> None:
    """The other one says why it is not, and prepares nothing."""
    g, scheme = generator(2), Scheme.FP8
    up, down = banks(g, scheme, scheme, 64, 32)
    inter = 64 if variant == "joined" else 48
    shared = SharedExpert(
        random_weight(g, "shared.up", scheme, inter, 64), random_weight(g, "shared.down", scheme, 64, inter)
    )
    layer, x, (ids, weights) = Experts(up, down, shared), randn(g, 2, 64, dtype=torch.bfloat16), routing(g, 2, 2)
    reasons = {
        "joined": device.unsupported(x, ids, weights, up, down, 1.0, shared, joined=True),
        "beside": device.unsupported(x, ids, weights, up, down, 1.0, shared, joined=False),
    }
    assert [name for name, reason in reasons.items() if reason is None] == [variant]
    for name in reasons:
        resident = ResidentWeights(torch.device("cpu"))
        device.prepare(layer, resident, joined=name == "joined")
        assert bool(resident.built) == (name == variant)


@every_scheme
@pytest.mark.parametrize("most", [4, 1], ids=["together", "apart"])
def test_many_tokens_take_the_shared_expert_as_linears(
    scheme: Scheme, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "TOGETHER_TOKENS", dict.fromkeys(device.TOGETHER_TOKENS, most))
    g = generator(31)
    up, down = banks(g, scheme, scheme, 64, 32)
    shared = SharedExpert(
        random_weight(g, "shared.up", scheme, 64, 64), random_weight(g, "shared.down", scheme, 64, 64)
    )
    x, (ids, weights) = randn(g, 2, 64, dtype=torch.bfloat16), routing(g, 2, 2)
    resident = ResidentWeights(torch.device("cpu"))
    device.prepare(Experts(up, down, shared), resident, joined=True)
    built = dict(resident.built)
    result = device.run(x, ids, weights, up, down, 2.5, shared, joined=True, resident=resident, invariant=False)
    assert resident.built == built, "all is there before the first call"
    values, part = Values(up, down), shared_part(x, shared)
    wrong = {
        "no shared part": values.ledger(x, ids, weights, 2.5, None),
        "half of it": values.ledger(x, ids, weights, 2.5, shared_part(x, shared, 1)),
    }
    assert_ledger(result, values.ledger(x, ids, weights, 2.5, part), wrong)
