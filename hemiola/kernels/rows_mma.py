"""Few tokens times weights, in CUDA C++: an NVFP4 linear, and routed experts of every scheme. See rows_mma.cu.

What Triton cannot say here is which thread holds which code. With the codes' place in the fragments of mma.m16n8k16
known, a warp reads them once, decodes them in registers and multiplies, with nothing in between.

Pairs grouped by expert are taken by the kernel of `grouped_wgmma` instead, where it can run and has a tile for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from hemiola.kernels import align as aligning
from hemiola.kernels import grouped_wgmma
from hemiola.kernels.cuda import CudaFunction, CudaModule, counter, source_of
from hemiola.kernels.experts import (
    BF16,
    FP8,
    NVFP4,
    End,
    ExpertWeights,
    SharedLinears,
    combine,
    empty_groups,
    empty_parts,
    fill_groups,
    pairs_per_expert,
)
from hemiola.kernels.grouped_wgmma import Fp8Tile, Nvfp4Tile, WgmmaTile
from hemiola.kernels.launch import is_interpreted, num_sms, shared_memory, uses_pdl
from hemiola.kernels.nvfp4 import GROUP, words_per_row
from hemiola.kernels.tiles import PIECE_BYTES

LINEAR, EXPERTS = "linear_rows_kernel", "experts_rows_kernel"
_RELU_SQUARED, _WEIGHTED, _QUANTISED, _EARLY, _OUT_IN_PLACE = 1, 2, 4, 8, 16
_LINEAR, _ALONE = 0, 1  # modes
_STEP_COLUMNS = {BF16: 32, FP8: 64, NVFP4: 128}  # of PIECE_BYTES each


@dataclass(frozen=True, slots=True)
class RowsTile:
    """tokens: 8, 16, 24 or 32 of a block. rows, splits: warps of a block along rows (16 each) and along columns. depth:
    steps, one tile of the weight each, that a warp has under way, an even number."""

    tokens: int
    rows: int
    splits: int
    depth: int


@dataclass(frozen=True, slots=True)
class GroupTile:
    """tokens: as in RowsTile. warps: of a block. depth: steps that a warp has under way, any number; best one that
    divides a row's. blocks: so many find room on a multiprocessor. first: percent of the products that these share
    evenly; they take the others `chunk` at a time (0: there are none), since multiprocessors differ in what memory
    gives them, and read x for each chunk again."""

    tokens: int
    warps: int
    depth: int
    blocks: int
    first: int = 100
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class DownTile:
    """splits: warps along the columns, for each of a token's experts. depth: as in RowsTile."""

    splits: int
    depth: int


# By scheme, for 1, 2, ... tokens: every pair alone, for up and for down.
DIRECT = {
    NVFP4: (
        (RowsTile(8, 2, 2, 6), DownTile(1, 6)),
        (RowsTile(8, 2, 2, 6), DownTile(1, 6)),
        (RowsTile(8, 2, 2, 4), DownTile(1, 2)),
        (RowsTile(8, 2, 2, 4), DownTile(1, 2)),
    ),
    FP8: ((RowsTile(8, 2, 4, 4), DownTile(2, 2)), *[(RowsTile(8, 4, 2, 4), DownTile(2, 2))] * 3),
    BF16: ((RowsTile(8, 1, 4, 8), DownTile(2, 2)), *[(RowsTile(8, 2, 4, 4), DownTile(2, 2))] * 3),
}
DIRECT_PAIRS = 12  # of more experts a token, a block of the down kernel would have too few registers
# By scheme: by the most pairs an expert, on average, that a tile is for.
GROUP_TILES = {
    NVFP4: ((4.5, GroupTile(8, 8, 3, 2)), (10.0, GroupTile(16, 8, 3, 2)), (24.0, GroupTile(24, 16, 3, 1))),
    FP8: ((3.7, GroupTile(8, 8, 3, 3, 50, 4)), (7.5, GroupTile(16, 16, 4, 1)), (18.0, GroupTile(24, 20, 3, 1))),
    BF16: ((3.7, GroupTile(8, 8, 3, 3, 50, 2)), (7.5, GroupTile(16, 10, 3, 2)), (30.0, GroupTile(24, 20, 2, 1))),
}
# By scheme, on Hopper: by the most pairs an expert, on average, that a tile is for. None: one of the other table.
WGMMA_TILES: dict[int, tuple[tuple[float, WgmmaTile | None], ...]] = {
    NVFP4: ((10.0, None), (24.0, Nvfp4Tile(24, 3, 7))),
    FP8: ((2.0, Fp8Tile(8, 6, 2)), (7.5, None), (18.0, Fp8Tile(24, 6, 2))),
    BF16: (),
}


@cache
def source() -> str:
    return source_of("nvfp4.cuh", "rows_mma.cu")


def rows_name(mode: int) -> str:
    return LINEAR if mode == _LINEAR else EXPERTS


def rows_options(scheme: int, tile: RowsTile, mode: int) -> tuple[str, ...]:
    """What the source's macros stand for in the kernel for a tile."""
    return (
        f"-DSCHEME={scheme}", f"-DNT={tile.tokens // 8}", f"-DWR={tile.rows}", f"-DWK={tile.splits}",
        f"-DDEPTH={tile.depth}", f"-DROWS_KERNEL={rows_name(mode)}", f"-DMODE={mode}",
    )  # fmt: skip


def group_options(scheme: int, tile: GroupTile, row_bytes: int, x_in_place: bool) -> tuple[str, ...]:
    is_whole = row_bytes // PIECE_BYTES % tile.depth == 0
    return (
        f"-DSCHEME={scheme}", f"-DNT={tile.tokens // 8}", f"-DWR={tile.warps}", f"-DDEPTH={tile.depth}",
        f"-DROWS_KERNEL={EXPERTS}", f"-DSTAYS={tile.blocks}", f"-DFIRST={tile.first}", f"-DCHUNK={tile.chunk}",
        f"-DWHOLE={int(is_whole)}", f"-DX_IN_PLACE={int(x_in_place)}",
    )  # fmt: skip


def down_options(scheme: int, tile: DownTile, top_k: int, num_shared: int) -> tuple[str, ...]:
    return (
        f"-DSCHEME={scheme}", "-DNT=1", f"-DDEPTH={tile.depth}",
        f"-DTOP_K={top_k}", f"-DNUM_SHARED={num_shared}", f"-DKS={tile.splits}",
    )  # fmt: skip


@cache
def _rows_function(scheme: int, tile: RowsTile, mode: int) -> CudaFunction:
    module = CudaModule(source(), rows_options(scheme, tile, mode))
    return module.function(rows_name(mode), "PlPPPPPffiiiiiiiiiPP")


@cache
def _group_function(options: tuple[str, ...]) -> CudaFunction:
    return CudaModule(source(), options).function(EXPERTS, "PlPPPPPPPPPiiiiiiiiiPPP")


@cache
def _down_function(scheme: int, tile: DownTile, top_k: int, num_shared: int) -> CudaFunction:
    module = CudaModule(source(), down_options(scheme, tile, top_k, num_shared))
    return module.function("down_kernel", "PPPPPPPlfPiiiii")


def rows_shared_bytes(scheme: int, tile: RowsTile, row_bytes: int) -> int:
    """Of a block: its rows of x, and later its sums."""
    return max(tile.tokens * _x_row_bytes(scheme, row_bytes), 4 * tile.splits * tile.tokens * 16 * tile.rows)


def group_shared_bytes(scheme: int, tile: GroupTile, row_bytes: int) -> int:
    """Of a block: its rows of x."""
    return tile.tokens * _x_row_bytes(scheme, row_bytes)


def group_fixed_bytes(tile: GroupTile) -> int:
    """What the kernel has besides: what its warps leave to each other, two numbers a pair, and two more."""
    return tile.tokens * (16 * 4 * tile.warps + 8) + 8


def down_shared_bytes(scheme: int, tile: DownTile, pairs_per_token: int, row_bytes: int) -> int:
    return pairs_per_token * max(_x_row_bytes(scheme, row_bytes), 4 * tile.splits * 16)


def _x_row_bytes(scheme: int, row_bytes: int) -> int:
    return 2 * (-(-row_bytes // PIECE_BYTES) * _STEP_COLUMNS[scheme] | 32)


def takes(scheme: int, x: Tensor, row_bytes: int, tile: RowsTile | GroupTile) -> bool:
    """Whether rows of x and of codes can be read 16 bytes at a time, and a tile's blocks find room for them."""
    if isinstance(tile, RowsTile):
        shared, blocks = rows_shared_bytes(scheme, tile, row_bytes), 1
    else:
        shared, blocks = group_shared_bytes(scheme, tile, row_bytes) + group_fixed_bytes(tile), tile.blocks
    return (
        not is_interpreted()
        and len(x) > 0
        and x.shape[1] % 8 == 0
        and (len(x) == 1 or x.stride(0) % 8 == 0)
        and x.data_ptr() % 16 == 0
        and row_bytes % 16 == 0
        and row_bytes >= PIECE_BYTES
        and blocks * shared <= shared_memory()
    )


def takes_experts(x: Tensor, up: ExpertWeights, down: ExpertWeights, num_tokens: int, top_k: int) -> bool:
    """Whether `experts` is for so many tokens of these experts."""
    scheme = up.scheme
    if scheme != down.scheme:
        return False
    row_bytes = max(bank.codes.shape[2] * bank.codes.element_size() for bank in (up, down))
    tile: RowsTile | GroupTile | WgmmaTile
    pairs_per_token = top_k + up.num_shared
    if is_direct(scheme, num_tokens, pairs_per_token):
        tile, down_tile = DIRECT[scheme][num_tokens - 1]
        if down_shared_bytes(scheme, down_tile, pairs_per_token, row_bytes) > shared_memory():
            return False
    else:
        tile = experts_tile(x, up, down, num_tokens, top_k)
        if not isinstance(tile, GroupTile):
            return True
        if pairs_per_expert(num_tokens, top_k, up) > GROUP_TILES[scheme][-1][0]:
            return False
    return takes(scheme, x, row_bytes, tile)


def is_direct(scheme: int, num_tokens: int, pairs_per_token: int) -> bool:
    """Whether so few pairs are taken one by one, not grouped by their experts."""
    return num_tokens <= len(DIRECT[scheme]) and pairs_per_token <= DIRECT_PAIRS


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: ExpertWeights,
    down_: ExpertWeights,
    routed_scale: float,
    shared: SharedLinears | None,
    end: End | None = None,
) -> Any:
    """`kernels.experts.experts` for few pairs an expert, where `takes_experts` says so.

    shared: its second linear runs beside the routed experts' up projection if it can, else before it. Pairs are grouped
    beside one of the two. ids and x have to be complete as soon as these kernels have begun: as where the kernel before
    them has made ids of x."""
    assert ids.dtype == torch.int32, f"ids are {ids.dtype}, and the kernels read int32"
    num_tokens, top_k = ids.shape
    scheme, hidden_type = up.scheme, torch.float8_e4m3fn if down_.scheme == FP8 else x.dtype
    pairs_per_token = top_k + up.num_shared
    inter = up.codes.shape[1]
    if is_direct(scheme, num_tokens, pairs_per_token):
        assert end is None, f"{num_tokens} tokens have no sum of their own"
        # Between the projections NVFP4's hidden lies as down's products read it, which spares every block the sorting.
        in_place = scheme == NVFP4 and inter % GROUP == 0
        width = 8 * words_per_row(inter) if in_place else inter
        hidden = torch.empty(num_tokens * pairs_per_token, width, dtype=hidden_type, device=x.device)
        row_tile, down_tile = DIRECT[scheme][num_tokens - 1]
        part = shared.part() if shared else None
        project(
            x, pairs_per_token, up, top_k, ids, hidden, row_tile, out_scales=down_.input_scale, out_in_place=in_place
        )  # fmt: skip
        columns = inter if in_place else None
        return down(hidden, down_, ids, weights, part, routed_scale, x.shape[1], down_tile, columns)
    tile, num_experts = experts_tile(x, up, down_, num_tokens, top_k), len(up.codes)
    # Allocated first, so that nothing which the shared part's kernels use is written beside them.
    groups = empty_groups(ids, num_experts, tile.tokens, up.num_shared)
    rows = None
    if isinstance(tile, GroupTile) and scheme == NVFP4 and aligning.takes_rows(ids, num_experts, x):
        rows = aligning.empty_rows(x)
    part = shared.part() if shared and not shared.beside else None
    between = shared.up() if shared and shared.beside else None
    fill_groups(groups, ids, num_experts, tile.tokens, up.num_shared, x, rows, early=bool(shared))
    hidden = torch.empty(num_tokens * pairs_per_token, inter, dtype=hidden_type, device=x.device)
    parts, pieces = empty_parts(x, num_tokens, top_k, down_)
    launch: Callable[..., None] = project_groups if isinstance(tile, GroupTile) else grouped_wgmma.project
    own_x, order = (x, {}) if rows is None else (rows, {"x_in_place": True})
    launch(own_x, pairs_per_token, up, top_k, *groups, hidden, tile, out_scales=down_.input_scale, **order)
    if shared and between is not None:
        part = shared.down(between, True)
    launch(hidden, 1, down_, top_k, *groups, parts, tile, pair_weights=weights, pieces=pieces)
    return (end or combine)(parts, pieces, top_k, routed_scale, part)


def experts_tile(
    x: Tensor, up: ExpertWeights, down: ExpertWeights, num_tokens: int, top_k: int
) -> WgmmaTile | GroupTile:
    """The tile for pairs grouped by expert: one of WGMMA_TILES where there is one for so many, and it can run."""
    scheme, per_expert = up.scheme, pairs_per_expert(num_tokens, top_k, up)
    wgmma_tile = next((tile for most, tile in WGMMA_TILES[scheme] if per_expert <= most), None)
    if wgmma_tile and grouped_wgmma.takes(x, up, down, wgmma_tile):
        return wgmma_tile
    return group_tile(scheme, per_expert)


def group_tile(scheme: int, per_expert: float) -> GroupTile:
    """The tile for so many pairs an expert, the last one for more."""
    tiles = GROUP_TILES[scheme]
    return next((tile for most, tile in tiles if per_expert <= most), tiles[-1][1])


def linear(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    num_rows: int,
    alpha: float,
    relu_squared: bool,
    out_scale: float | None,
    tile: RowsTile,
) -> Tensor:
    """x (T, in) bfloat16 times one weight of `nvfp4.packed`: (T, num_rows) bfloat16, or e4m3 with out_scale.

    alpha: multiplies the accumulator, `nvfp4.REMAINDER` included.
    """
    num_tokens, columns = x.shape
    row_bytes = 4 * words.shape[1]
    dtype = x.dtype if out_scale is None else torch.float8_e4m3fn
    out = torch.empty(num_tokens, num_rows, dtype=dtype, device=x.device)
    flags = _RELU_SQUARED * relu_squared | _QUANTISED * (out_scale is not None)
    _rows_function(NVFP4, tile, _LINEAR).launch(
        (triton.cdiv(num_rows, 16 * tile.rows), triton.cdiv(num_tokens, tile.tokens), 1),
        (32 * tile.rows * tile.splits, 1, 1),
        (
            x, x.stride(0), words, scales, None, None, out, alpha, out_scale or 1.0, num_tokens, 1, 1, 0, 0, num_rows,
            columns, row_bytes, flags, None, None,
        ),
        shared_bytes=rows_shared_bytes(NVFP4, tile, row_bytes),
        pdl=uses_pdl(),
    )  # fmt: skip
    return out


def project(
    x: Tensor,
    pairs_per_x: int,
    bank: ExpertWeights,
    top_k: int,
    ids: Tensor,
    out: Tensor,
    tile: RowsTile,
    *,
    out_scales: Tensor | None = None,
    out_in_place: bool = False,
) -> None:
    """The up projection of every pair alone, with its squared ReLU, into `out` (pairs, rows) bfloat16, or e4m3 with
    out_scales. Row p // pairs_per_x of x, bfloat16, belongs to pair p; ids are the routed ones. out_in_place, for
    NVFP4: rows of out have whole steps, in the order of products."""
    num_rows = bank.codes.shape[1] if out_in_place else out.shape[1]
    row_bytes = bank.codes.shape[2] * bank.codes.element_size()
    flags = _RELU_SQUARED | _OUT_IN_PLACE * out_in_place | _QUANTISED * (out_scales is not None)
    _rows_function(bank.scheme, tile, _ALONE).launch(
        (triton.cdiv(num_rows, 16 * tile.rows), len(out), 1),
        (32 * tile.rows * tile.splits, 1, 1),
        (
            x, x.stride(0), bank.codes, bank.block_scales, bank.scale, ids, out, 1.0, 1.0, len(out), pairs_per_x, top_k,
            bank.num_shared, len(bank.codes), num_rows, x.shape[1], row_bytes, flags, bank.input_scale, out_scales,
        ),
        shared_bytes=rows_shared_bytes(bank.scheme, tile, row_bytes),
        pdl=uses_pdl(),
    )  # fmt: skip


def project_groups(
    x: Tensor,
    pairs_per_x: int,
    bank: ExpertWeights,
    top_k: int,
    sorted_pairs: Tensor,
    experts: Tensor,
    num_tiles: Tensor,
    out: Tensor,
    tile: GroupTile,
    *,
    out_scales: Tensor | None = None,
    pair_weights: Tensor | None = None,
    pieces: Tensor | None = None,
    x_in_place: bool = False,
) -> None:
    """One projection of all pairs, into `out` (pairs, rows) bfloat16, or e4m3 with out_scales; that of the shared
    expert's pieces, weighted, into `pieces`.

    Without pair_weights: up, with its squared ReLU; with them: down, weighted, and right behind an up projection of the
    same groups, which it begins to read before up has ended. Row p // pairs_per_x of x belongs to pair p; bfloat16, or
    e4m3 for down. sorted_pairs, experts, num_tiles: tiles of tile.tokens pairs, as of `experts.align`. x_in_place, for
    NVFP4: rows of x have whole steps, in the order of products, as of `experts.align_with_rows`.
    """
    row_bytes = bank.codes.shape[2] * bank.codes.element_size()
    flags = _RELU_SQUARED if pair_weights is None else _WEIGHTED | _EARLY
    _group_function(group_options(bank.scheme, tile, row_bytes, x_in_place)).launch(
        (num_sms() * tile.blocks, 1, 1),
        (32 * tile.warps, 1, 1),
        (
            x, x.stride(0), bank.codes, bank.block_scales, bank.scale, sorted_pairs, experts, num_tiles, pair_weights,
            out, pieces, len(out), pairs_per_x, top_k, bank.num_shared, len(bank.codes), out.shape[1], x.shape[1],
            row_bytes, flags | _QUANTISED * (out_scales is not None),
            None if x.dtype == torch.float8_e4m3fn else bank.input_scale, out_scales,
            # Down begins beside up.
            counter(x.device, "up" if pair_weights is None else "down") if tile.chunk else None,
        ),
        shared_bytes=group_shared_bytes(bank.scheme, tile, row_bytes),
        pdl=uses_pdl(),
    )  # fmt: skip


def down(
    hidden: Tensor,
    bank: ExpertWeights,
    ids: Tensor,
    pair_weights: Tensor,
    shared: Tensor | None,
    routed_scale: float,
    num_rows: int,
    tile: DownTile,
    columns_in_place: int | None = None,
) -> Tensor:
    """Few tokens' output, (T, num_rows) bfloat16, from hidden (pairs, inter) bfloat16, FP8 e4m3, in the order of pairs:
    each expert's projection, their weighted sum, its scale and the shared part in one kernel. Right behind an up
    projection of the same ids, which it begins to read before up has ended. columns_in_place: rows of hidden have whole
    steps, of so many columns, in the order of products."""
    num_tokens, top_k = ids.shape
    row_bytes, pairs_per_token = bank.codes.shape[2] * bank.codes.element_size(), top_k + bank.num_shared
    out = torch.empty(num_tokens, num_rows, dtype=torch.bfloat16, device=hidden.device)
    _down_function(bank.scheme, tile, top_k, bank.num_shared).launch(
        (triton.cdiv(num_rows, 16), num_tokens, 1),
        (32 * pairs_per_token * tile.splits, 1, 1),
        (
            hidden, bank.codes, bank.block_scales, bank.scale, ids, pair_weights, shared,
            0 if shared is None else shared.stride(0), routed_scale, out, len(bank.codes), num_rows,
            columns_in_place or hidden.shape[1], row_bytes, columns_in_place is not None,
        ),
        shared_bytes=down_shared_bytes(bank.scheme, tile, pairs_per_token, row_bytes),
        pdl=uses_pdl(),
    )  # fmt: skip
    return out
