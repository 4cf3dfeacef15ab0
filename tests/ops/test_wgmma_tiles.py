"""Which tile pairs take that are grouped by expert, and what is done for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.device_gates import RUNS
from hemiola.kernels import align, grouped_wgmma, rows_mma
from hemiola.kernels.experts import BF16, FP8, NVFP4, ExpertWeights, SharedLinears
from hemiola.kernels.grouped_wgmma import Fp8Tile, Nvfp4Tile, WgmmaTile
from hemiola.kernels.nvfp4 import words_per_row
from hemiola.kernels.rows_mma import GROUP_TILES, WGMMA_TILES, GroupTile, experts_tile, takes_experts
from hemiola.kernels.tiles import tiled_shape
from tests.support.seeded_checkpoint import CONFIG

NUM_EXPERTS, TOP_K, HIDDEN, INTER = 128, 6, 2688, 1856
SHARED_LIMIT = 232_448  # of a block, on Hopper
SCHEMES = {"bf16": BF16, "fp8": FP8, "nvfp4": NVFP4}
every_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
LAST = FP8, WGMMA_TILES[FP8][-1], GROUP_TILES[FP8][-1]  # scheme, and (most pairs, tile) of both kinds


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def bank(scheme: int, rows: int, columns: int, num_experts: int = NUM_EXPERTS, num_shared: int = 0) -> ExpertWeights:
    count = num_experts + num_shared
    scales = empty(count, dtype=torch.float32)
    if scheme == NVFP4:
        words = words_per_row(columns)
        codes, block_scales = (empty(count, rows, size, dtype=torch.int32) for size in (words, words // 8))
        return ExpertWeights(codes, block_scales, scales, None, num_shared)
    dtype = torch.float8_e4m3fn if scheme == FP8 else torch.bfloat16
    codes = empty(count, *tiled_shape(rows, columns, dtype), dtype=dtype)
    return ExpertWeights(codes, None, *((scales, scales) if scheme == FP8 else (None, None)), num_shared)


def banks(
    scheme: int, hidden: int = HIDDEN, inter: int = INTER, num_shared: int = 0
) -> tuple[ExpertWeights, ExpertWeights]:
    return bank(scheme, inter, hidden, num_shared=num_shared), bank(scheme, hidden, inter, num_shared=num_shared)


def most_tokens(most_pairs: float) -> int:
    return int(most_pairs * NUM_EXPERTS / TOP_K)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    take_gpu(monkeypatch, 90)
    monkeypatch.setattr(rows_mma, "shared_memory", lambda: SHARED_LIMIT)


def take_gpu(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    monkeypatch.setattr(grouped_wgmma, "capability", lambda: capability)


@every_scheme
@pytest.mark.parametrize("num_shared", [0, 2])
def test_a_tile_of_the_table_is_taken_up_to_its_pairs_on_hopper(
    scheme: int, num_shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs of pieces of the shared expert do not count. For more than the last is for, and on any other GPU, it is a
    tile of the other table."""
    up, down = banks(scheme, num_shared=num_shared)
    table, wanted = WGMMA_TILES[scheme], list[WgmmaTile | None]()
    tokens = [5]
    for most, tile in table:
        tokens += [most_tokens(most), most_tokens(most) + 1]
        wanted += [tile, tile]
    wanted.append(None)
    for num_tokens, tile in zip(tokens, wanted, strict=True):
        group_tile = rows_mma.group_tile(scheme, num_tokens * TOP_K / NUM_EXPERTS)
        x = empty(num_tokens, HIDDEN)
        take_gpu(monkeypatch, 90)
        assert experts_tile(x, up, down, num_tokens, TOP_K) == (tile or group_tile), num_tokens
        assert takes_experts(x, up, down, num_tokens, TOP_K) or tile is None
        for capability in (0, 80, 89, 100, 120):
            take_gpu(monkeypatch, capability)
            assert experts_tile(x, up, down, num_tokens, TOP_K) == group_tile


@pytest.mark.parametrize(("scheme", "kind"), [(FP8, Fp8Tile), (NVFP4, Nvfp4Tile)], ids=["fp8", "nvfp4"])
def test_what_the_kernel_cannot_read_or_write_takes_the_other_kind(scheme: int, kind: type[WgmmaTile]) -> None:
    tokens = 256
    fitting, apart = empty(tokens, HIDDEN), empty(tokens, HIDDEN + 4)[:, :HIDDEN]
    assert isinstance(experts_tile(fitting, *banks(scheme), tokens, TOP_K), kind)
    assert isinstance(experts_tile(apart, *banks(scheme), tokens, TOP_K), GroupTile)
    assert not takes_experts(apart, *banks(scheme), tokens, TOP_K), "which reads 16 bytes at a time, too"
    half = banks(scheme, HIDDEN + 8)  # down's rows are no whole tiles
    assert isinstance(experts_tile(empty(tokens, HIDDEN + 8), *half, tokens, TOP_K), GroupTile)
    some = torch.empty(tokens * HIDDEN + 8, dtype=torch.bfloat16)
    for start, own in ((0, kind), (1, GroupTile), (8, kind)):
        x = some[start : start + tokens * HIDDEN].view(tokens, HIDDEN)
        assert isinstance(experts_tile(x, *banks(scheme), tokens, TOP_K), own)


def test_where_x_finds_no_room_it_is_the_other_kind() -> None:
    scheme, (most, tile), (_, group_tile) = LAST
    num_tokens = most_tokens(most)
    for hidden, inter in ((3840, INTER), (INTER, 3840)):  # x of up, and what down reads
        x, (up, down) = empty(num_tokens, hidden), banks(scheme, hidden, inter)
        assert experts_tile(x, up, down, num_tokens, TOP_K) == group_tile
        assert takes_experts(x, up, down, num_tokens, TOP_K)
    x = empty(num_tokens, 3072)
    assert experts_tile(x, *banks(scheme, 3072, 3072), num_tokens, TOP_K) == tile


def test_either_kind_that_can_run_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, (most, _), (most_of_group, _) = LAST
    num_tokens, too_many = most_tokens(min(most, most_of_group)), most_tokens(max(most, most_of_group)) + 1
    x, (up, down) = empty(num_tokens, HIDDEN), banks(scheme)
    assert not takes_experts(empty(too_many, HIDDEN), up, down, too_many, TOP_K), "too many for both"
    assert not takes_experts(x, up, banks(BF16)[1], num_tokens, TOP_K), "two schemes"
    monkeypatch.setattr(rows_mma, "shared_memory", lambda: 1000)
    assert takes_experts(x, up, down, num_tokens, TOP_K)
    take_gpu(monkeypatch, 100)
    assert not takes_experts(x, up, down, num_tokens, TOP_K)
    monkeypatch.setattr(rows_mma, "shared_memory", lambda: SHARED_LIMIT)
    assert takes_experts(x, up, down, num_tokens, TOP_K)


def row_steps(scheme: int, columns: int) -> int:
    return grouped_wgmma.row_steps(bank(scheme, 16, columns, 1))


TILES = [(scheme, tile) for scheme, table in WGMMA_TILES.items() for _, tile in table if tile]


@pytest.mark.parametrize(("scheme", "tile"), TILES, ids=str)
def test_a_block_fits_its_multiprocessor(scheme: int, tile: WgmmaTile) -> None:
    """With what the kernel has besides: two barriers a stage and a tile's x, and two numbers for each of its pairs."""
    assert tile.fits(row_steps(scheme, HIDDEN))
    assert tile.fits(row_steps(scheme, INTER))
    for steps in range(1, 200):
        if tile.fits(steps):
            stages, x_buffers = (tile.stages(steps), tile.x_buffers) if isinstance(tile, Fp8Tile) else (0, 1)
            besides = 16 * (stages + x_buffers) + 8 * tile.tokens * x_buffers
            assert tile.shared_bytes(steps) + besides <= SHARED_LIMIT, steps


def test_a_strip_is_read_in_parts_that_are_even_where_they_can_be() -> None:
    tile = Nvfp4Tile(24, 3, 7)
    assert [tile.depth(steps) for steps in (1, 4, 8, 15, 21, 32)] == [1, 4, 4, 5, 7, 4]
    assert [tile.depth(steps) for steps in (11, 22, 46)] == [7, 7, 7], "none of one or two"


@pytest.mark.parametrize("has_shared", [True, False])
@pytest.mark.parametrize("capability", [90, 100])
@every_scheme
def test_x_stays_as_it_is_for_wgmma(
    scheme: int, capability: int, has_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups are of the tile's size, in memory from before the shared part, and both projections take them; for a
    GroupTile NVFP4's x is brought into the order of products."""
    num_tokens, num_experts, hidden, inter, events = 16, 4, 768, 512, list[str]()
    tile = Nvfp4Tile(16, 3, 7) if scheme == NVFP4 else Fp8Tile(16, 2, 1)
    monkeypatch.setitem(WGMMA_TILES, scheme, ((99.0, tile),))
    take_gpu(monkeypatch, capability)
    x, rows, parts = empty(num_tokens, hidden), empty(num_tokens, hidden), empty(num_tokens, hidden)
    ids, weights = empty(num_tokens, 2, dtype=torch.int32), empty(num_tokens, 2, dtype=torch.float32)
    up, down = bank(scheme, inter, hidden, num_experts), bank(scheme, hidden, inter, num_experts)
    calls: dict[str, list[Any]] = {}

    def noted(module: Any, name: str, result: Any) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(name)
            calls.setdefault(name, []).append((args, kwargs))
            return result

        monkeypatch.setattr(module, name, call)

    shared = SharedLinears(lambda: x, lambda hidden, early: events.append("shared") or x, beside=False)

    is_wgmma = capability == 90
    brings_rows = not is_wgmma and scheme == NVFP4
    groups = tuple(empty(1, dtype=torch.int32) for _ in range(3))
    noted(rows_mma, "empty_groups", groups)
    noted(align, "empty_rows", rows)
    noted(grouped_wgmma, "project", None)
    for name, result in (("fill_groups", None), ("project_groups", None), ("combine", parts)):
        noted(rows_mma, name, result)
    assert rows_mma.experts(x, ids, weights, up, down, 2.5, shared if has_shared else None) is parts
    name = "project" if is_wgmma else "project_groups"
    before = ["empty_groups", *["empty_rows"] * brings_rows, *["shared"] * has_shared]
    assert events == [*before, "fill_groups", name, name, "combine"]
    own_tile = tile if is_wgmma else rows_mma.group_tile(scheme, num_tokens * 2 / num_experts)
    assert calls["empty_groups"] == [((ids, num_experts, own_tile.tokens, 0), {})]
    ((filled, _),) = calls["fill_groups"]
    assert filled[0] is groups
    assert filled[3] == own_tile.tokens
    assert filled[-1] is (rows if brings_rows else None)
    (first, first_named), (second, second_named) = calls[name]
    assert first[0] is (rows if brings_rows else x)
    assert second[0] is first[7], "what up writes is what down reads"
    assert (first[1], second[1]) == (2, 1)
    assert (first[2], second[2]) == (up, down)
    for given in (first, second):
        assert all(mine is wanted for mine, wanted in zip(given[4:7], groups, strict=True))
        assert given[8] == own_tile
    assert first_named["out_scales"] is down.input_scale
    assert first_named.get("x_in_place", False) == brings_rows
    assert second_named["pair_weights"] is weights
    assert second[0].dtype == (torch.float8_e4m3fn if scheme == FP8 else torch.bfloat16)


@pytest.mark.parametrize(("run", "kind"), [("fp8", Fp8Tile), ("nvfp4", Nvfp4Tile)])
def test_gates_in_small_steps_reach_them(run: str, kind: type[WgmmaTile]) -> None:
    """With the experts of the seeded checkpoints, in a step of prompts, and FP8 in one of decodes."""
    num_experts, top_k, hidden, inter = (
        CONFIG[name] for name in ("n_routed_experts", "num_experts_per_tok", "hidden_size", "moe_intermediate_size")
    )
    scheme, small = SCHEMES[run], RUNS[f"{run} in small steps"]
    up, down = bank(scheme, inter, hidden, num_experts), bank(scheme, hidden, inter, num_experts)
    for num_tokens in (small.step_tokens, *([small.num_seqs] if kind is Fp8Tile else [])):
        assert isinstance(experts_tile(empty(num_tokens, hidden), up, down, num_tokens, top_k), kind)
    for num_tokens in (24, 2048):
        tile = experts_tile(empty(num_tokens, hidden), up, down, num_tokens, top_k)
        assert not isinstance(tile, kind), "the other gates, which reach the other kernels"
