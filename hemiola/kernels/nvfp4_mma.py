"""Few tokens times NVFP4 weights, in CUDA C++: a linear, and routed experts. See nvfp4_mma.cu.

What Triton cannot say here is which thread holds which code. With the codes' place in the fragments of mma.m16n8k16
known, a warp reads them once, decodes them in registers and multiplies, with nothing in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import triton
from torch import Tensor

from hemiola.kernels.cuda import CudaFunction, CudaModule
from hemiola.kernels.experts import NVFP4, ExpertWeights, align, combine, empty_parts
from hemiola.kernels.launch import is_interpreted, shared_memory, uses_pdl

LINEAR, EXPERTS = "linear_rows_kernel", "experts_rows_kernel"
_RELU_SQUARED, _WEIGHTED, _QUANTISED = 1, 2, 4
_STEP_BYTES, _STEP_COLUMNS, _X_PADDING = 64, 128, 32


@dataclass(frozen=True, slots=True)
class RowsTile:
    """tokens: 8, 16, 24 or 32 of a block. rows, splits: warps of a block along rows (16 each) and along columns. depth:
    steps of 128 columns that a warp has under way, an even number."""

    tokens: int
    rows: int
    splits: int
    depth: int


@dataclass(frozen=True, slots=True)
class DownTile:
    """splits: warps along the columns, for each of a token's experts. depth: as in RowsTile."""

    splits: int
    depth: int


# For 1, 2, ... tokens: every pair alone, for up and for down.
DIRECT = (
    (RowsTile(8, 2, 2, 4), DownTile(2, 2)),
    (RowsTile(8, 2, 2, 4), DownTile(1, 4)),
    (RowsTile(8, 4, 2, 2), DownTile(1, 4)),
    (RowsTile(8, 4, 2, 2), DownTile(1, 4)),
)
DIRECT_TOKENS = len(DIRECT)
DIRECT_PAIRS = 12  # of more experts a token, a block of the down kernel would have too few registers
# By the most pairs an expert, on average, that a tile is for.
GROUP_TILES = ((8.0, RowsTile(8, 8, 1, 2)), (18.0, RowsTile(16, 12, 1, 2)))


@cache
def source() -> str:
    return Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")


def rows_options(tile: RowsTile, name: str) -> tuple[str, ...]:
    """What the source's macros stand for in the kernel for a tile."""
    return (
        f"-DNT={tile.tokens // 8}", f"-DWR={tile.rows}", f"-DWK={tile.splits}", f"-DDEPTH={tile.depth}",
        f"-DROWS_KERNEL={name}",
    )  # fmt: skip


def down_options(tile: DownTile, top_k: int, num_shared: int) -> tuple[str, ...]:
    return (
        "-DNT=1", "-DWR=1", "-DWK=1", f"-DDEPTH={tile.depth}", f"-DTOP_K={top_k}", f"-DNUM_SHARED={num_shared}",
        f"-DKS={tile.splits}",
    )  # fmt: skip


@cache
def _rows_function(tile: RowsTile, name: str) -> CudaFunction:
    return CudaModule(source(), rows_options(tile, name)).function(name, "PlPPPPPPPPPffiiiiiiiii")


@cache
def _down_function(tile: DownTile, top_k: int, num_shared: int) -> CudaFunction:
    return CudaModule(source(), down_options(tile, top_k, num_shared)).function("down_kernel", "PPPPPPPlfPiiii")


def rows_shared_bytes(tile: RowsTile, row_bytes: int) -> int:
    """Of a block: its rows of x, and later its sums."""
    return max(tile.tokens * _x_row_bytes(row_bytes), 4 * tile.splits * tile.tokens * 16 * tile.rows)


def down_shared_bytes(tile: DownTile, pairs_per_token: int, row_bytes: int) -> int:
    return pairs_per_token * max(_x_row_bytes(row_bytes), 4 * tile.splits * 16)


def _x_row_bytes(row_bytes: int) -> int:
    return 2 * (-(-row_bytes // _STEP_BYTES) * _STEP_COLUMNS + _X_PADDING)


def takes(x: Tensor, row_bytes: int, tile: RowsTile) -> bool:
    """Whether rows of x and of codes can be read 16 bytes at a time, and a block finds room for them."""
    return (
        not is_interpreted()
        and len(x) > 0
        and x.shape[1] % 8 == 0
        and (len(x) == 1 or x.stride(0) % 8 == 0)
        and x.data_ptr() % 16 == 0
        and row_bytes % 16 == 0
        and row_bytes >= _STEP_BYTES
        and rows_shared_bytes(tile, row_bytes) <= shared_memory()
    )


def takes_experts(x: Tensor, up: ExpertWeights, down: ExpertWeights, num_tokens: int, top_k: int) -> bool:
    """Whether `experts` is for so many tokens of these experts."""
    if up.scheme != NVFP4 or down.scheme != NVFP4 or down.codes.shape[1] % 8 or up.codes.shape[1] % 8:
        return False
    row_bytes = 4 * max(up.codes.shape[2], down.codes.shape[2])
    if is_direct(num_tokens, top_k + up.num_shared):
        tile, down_tile = DIRECT[num_tokens - 1]
        if down_shared_bytes(down_tile, top_k + up.num_shared, row_bytes) > shared_memory():
            return False
    else:
        per_expert = num_tokens * top_k / (len(up.codes) - up.num_shared)
        if per_expert > GROUP_TILES[-1][0]:
            return False
        tile = group_tile(per_expert)
    return takes(x, row_bytes, tile)


def is_direct(num_tokens: int, pairs_per_token: int) -> bool:
    """Whether so few pairs are taken one by one, not grouped by their experts."""
    return num_tokens <= DIRECT_TOKENS and pairs_per_token <= DIRECT_PAIRS


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: ExpertWeights,
    down_: ExpertWeights,
    routed_scale: float,
    shared: Tensor | None,
) -> Tensor:
    """`kernels.experts.experts` for few pairs an expert, where `takes_experts` says so."""
    assert up.block_scales is not None, "weights are not NVFP4"
    assert down_.block_scales is not None, "weights are not NVFP4"
    assert up.scale is not None, "no scale"
    assert down_.scale is not None, "no scale"
    assert ids.dtype == torch.int32, f"ids are {ids.dtype}, and the kernels read int32"
    num_tokens, top_k = ids.shape
    pairs_per_token = top_k + up.num_shared
    hidden = torch.empty(num_tokens * pairs_per_token, up.codes.shape[1], dtype=x.dtype, device=x.device)
    if is_direct(num_tokens, pairs_per_token):
        tile, down_tile = DIRECT[num_tokens - 1]
        project(x, pairs_per_token, up, top_k, None, ids, None, hidden, tile)
        return down(hidden, down_, ids, weights, shared, routed_scale, down_tile)
    tile = group_tile(num_tokens * top_k / (len(up.codes) - up.num_shared))
    pairs, tile_experts, num_tiles = align(ids, up, tile.tokens)
    project(x, pairs_per_token, up, top_k, pairs, tile_experts, num_tiles, hidden, tile)
    parts, pieces = empty_parts(x, num_tokens, top_k, down_)
    project(hidden, 1, down_, top_k, pairs, tile_experts, num_tiles, parts, tile, weights, pieces)
    return combine(parts, pieces, top_k, routed_scale, shared)


def group_tile(per_expert: float) -> RowsTile:
    """The tile for so many pairs an expert, the last one for more."""
    return next((tile for most, tile in GROUP_TILES if per_expert <= most), GROUP_TILES[-1][1])


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
    _rows_function(tile, LINEAR).launch(
        (triton.cdiv(num_rows, 16 * tile.rows), triton.cdiv(num_tokens, tile.tokens), 1),
        (32 * tile.rows * tile.splits, 1, 1),
        (
            x, x.stride(0), words, scales, None, None, None, None, None, out, None, alpha, out_scale or 1.0,
            num_tokens, 1, 1, 0, 0, num_rows, columns, row_bytes, flags,
        ),
        shared_bytes=rows_shared_bytes(tile, row_bytes),
        pdl=uses_pdl(),
    )  # fmt: skip
    return out


def project(
    x: Tensor,
    pairs_per_x: int,
    bank: ExpertWeights,
    top_k: int,
    sorted_pairs: Tensor | None,
    experts: Tensor,
    num_tiles: Tensor | None,
    out: Tensor,
    tile: RowsTile,
    pair_weights: Tensor | None = None,
    pieces: Tensor | None = None,
) -> None:
    """One projection of all pairs, into `out` (pairs, rows) bfloat16 and, of the shared expert's pieces, `pieces`.

    Without pair_weights: up, with its squared ReLU; with them: down, weighted. Row p // pairs_per_x of x belongs to
    pair p. sorted_pairs, experts, num_tiles: tiles of tile.tokens pairs, as of `experts.align`; without sorted_pairs
    each pair is alone, and experts are the routed ids.
    """
    num_experts, num_rows, words = bank.codes.shape
    row_bytes = 4 * words
    _rows_function(tile, EXPERTS).launch(
        (triton.cdiv(num_rows, 16 * tile.rows), len(out) if sorted_pairs is None else experts.numel(), 1),
        (32 * tile.rows * tile.splits, 1, 1),
        (
            x, x.stride(0), bank.codes, bank.block_scales, bank.scale, sorted_pairs, experts, num_tiles, pair_weights,
            out, pieces, 1.0, 1.0, len(out), pairs_per_x, top_k, bank.num_shared, num_experts, num_rows, x.shape[1],
            row_bytes, _RELU_SQUARED if pair_weights is None else _WEIGHTED,
        ),
        shared_bytes=rows_shared_bytes(tile, row_bytes),
        pdl=uses_pdl(),
    )  # fmt: skip


def down(
    hidden: Tensor,
    bank: ExpertWeights,
    ids: Tensor,
    pair_weights: Tensor,
    shared: Tensor | None,
    routed_scale: float,
    tile: DownTile,
) -> Tensor:
    """Few tokens' output, (T, rows) bfloat16, from hidden (pairs, inter) bfloat16 in the order of pairs: each expert's
    projection, their weighted sum, its scale and the shared part in one kernel."""
    num_tokens, top_k = ids.shape
    num_experts, num_rows, words = bank.codes.shape
    row_bytes, pairs_per_token = 4 * words, top_k + bank.num_shared
    out = torch.empty(num_tokens, num_rows, dtype=hidden.dtype, device=hidden.device)
    _down_function(tile, top_k, bank.num_shared).launch(
        (triton.cdiv(num_rows, 16), num_tokens, 1),
        (32 * pairs_per_token * tile.splits, 1, 1),
        (
            hidden, bank.codes, bank.block_scales, bank.scale, ids, pair_weights, shared,
            0 if shared is None else shared.stride(0), routed_scale, out, num_experts, num_rows, hidden.shape[1],
            row_bytes,
        ),
        shared_bytes=down_shared_bytes(tile, pairs_per_token, row_bytes),
        pdl=uses_pdl(),
    )  # fmt: skip
    return out
