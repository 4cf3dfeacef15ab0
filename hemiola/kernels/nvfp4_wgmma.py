"""Many tokens times NVFP4 weights on Hopper, in CUDA C++: a linear, and routed experts. See nvfp4_wgmma.cu.

Weights are decoded in registers, which are an operand of wgmma; rows of x come through shared memory. A sum runs over
the columns in order, in one accumulator: a token's result is the same to the bit for any tile and any neighbours. It
differs in its last bits from what the kernels of `rows_mma` and Triton's compute, which sum in another order; so where
rows must not differ it is taken for any number of tokens, whose addresses and strides torch's allocations make fit.

A linear of so few tokens that its items leave half of the GPU idle shares out the columns, too (`SplitTile`): a cluster
of blocks adds its sums in the order of the blocks. Their number is all that bits depend on then.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from hemiola.kernels.cuda import CudaFunction, CudaModule, counter, source_of
from hemiola.kernels.experts import NVFP4, End, ExpertWeights, align, combine, empty_parts, pairs_per_expert
from hemiola.kernels.launch import capability, num_sms, uses_pdl

LINEAR, EXPERTS = "linear_wgmma_kernel", "experts_wgmma_kernel"
SHARED_BYTES = 1024 + 4 * 32768 + 2 * 32768 + 4096
THREADS = 384
_RELU_SQUARED, _QUANTISED = 1, 4
_UNIT, _GROUP_BYTES, _WIDTHS = 128, 64, (32, 64, 96, 128)
_SPLIT_ROWS, _MOST_SPLITS = (256, 128), 8


class WideTile(NamedTuple):
    """An item of a block. tokens: a multiple of 32 up to 128. units: warpgroups that multiply, one or two, 128 rows of
    weights each."""

    tokens: int
    units: int


class SplitTile(NamedTuple):
    """An item of a cluster. tokens: a multiple of 32 up to 128. rows: of weights, 128 or 256. splits: blocks, up to
    eight, which share out the columns."""

    tokens: int
    rows: int
    splits: int


MANY = WideTile(128, 2)
# From so many pairs an expert, on average, and so many tokens of a linear.
LEAST_PAIRS, LEAST_TOKENS = 24.0, 17


def product(tokens: int) -> str:
    """The wgmma of 64 rows, A in registers, and `tokens` columns of B, in shared memory, as a CUDA function."""
    size = tokens // 2
    sums = ", ".join(f"%{i}" for i in range(size))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(size))
    return f"""
template <> __device__ __forceinline__ void product<{tokens}>(
    float (&d)[{size}], const unsigned (&a)[4], unsigned long long b) {{
    asm volatile("{{.reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.bf16.bf16 "
                 "{{{sums}}}, {{%{size}, %{size + 1}, %{size + 2}, %{size + 3}}}, %{size + 4}, p, 1, 1, 0;}}"
                 : {outputs} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}}"""


@cache
def source() -> str:
    declared = (
        "template <int N> __device__ __forceinline__ void product(\n"
        "    float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b);"
    )
    products = "".join(product(tokens) for tokens in _WIDTHS)
    return f"{declared}{products}\n{source_of('wgmma.cuh', 'nvfp4.cuh', 'nvfp4_wgmma.cu')}"


@cache
def function(name: str, options: tuple[str, ...] = ()) -> CudaFunction:
    return CudaModule(source(), (f"-DWGMMA_KERNEL={name}", *options)).function(name, "PlPPPPPPPPPPffiiiiiiiiiii")


@cache
def split_function(tile: SplitTile, options: tuple[str, ...] = ()) -> CudaFunction:
    sizes = (f"-DSPLITS={tile.splits}", f"-DTILE_TOKENS={tile.tokens}", f"-DTILE_ROWS={tile.rows}")
    return CudaModule(source(), (f"-DWGMMA_KERNEL={LINEAR}", *sizes, *options)).function(LINEAR, "PlPPPffiiiii")


def split_shared_bytes(tile: SplitTile) -> int:
    stages = 8 if tile.tokens < 64 else 512 // tile.tokens
    return 1024 + stages * 256 * tile.tokens + 2 * tile.rows * tile.tokens + 1024


def takes(x: Tensor, num_rows: int, words: int) -> bool:
    """Whether the GPU is one, and rows of x, of codes and of the result can be accessed 16 bytes at a time."""
    return (
        capability() == 90
        and len(x) > 0
        and x.dtype == torch.bfloat16
        and x.shape[1] % 8 == 0
        and (len(x) == 1 or x.stride(0) % 8 == 0)
        and x.data_ptr() % 16 == 0
        and num_rows % 16 == 0
        and 4 * words % _GROUP_BYTES == 0
        and words > 0
    )


def takes_experts(
    x: Tensor, up: ExpertWeights, down: ExpertWeights, num_tokens: int, top_k: int, invariant: bool = False
) -> bool:
    """Whether `experts` is for so many tokens of these experts; for any number of them where rows are not to differ."""
    return (
        up.scheme == NVFP4
        and down.scheme == NVFP4
        and (invariant or pairs_per_expert(num_tokens, top_k, up) >= LEAST_PAIRS)
        and all(takes(x, bank.codes.shape[1], bank.codes.shape[2]) for bank in (up, down))
    )


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: ExpertWeights,
    down: ExpertWeights,
    routed_scale: float,
    shared: Tensor | None,
    tile: WideTile | None = None,
    end: End | None = None,
) -> Any:
    """`kernels.experts.experts` for many pairs an expert, where `takes_experts` says so. No bit depends on the tile."""
    num_tokens, top_k = ids.shape
    tile = tile or experts_tile(num_tokens, top_k, up)
    pairs_per_token = top_k + up.num_shared
    groups = align(ids, len(up.codes), tile.tokens, up.num_shared)
    hidden = torch.empty(num_tokens * pairs_per_token, up.codes.shape[1], dtype=x.dtype, device=x.device)
    project(x, pairs_per_token, up, top_k, *groups, hidden, tile)
    parts, pieces = empty_parts(x, num_tokens, top_k, down)
    project(hidden, 1, down, top_k, *groups, parts, tile, pair_weights=weights, pieces=pieces)
    return (end or combine)(parts, pieces, top_k, routed_scale, shared)


def project(
    x: Tensor,
    pairs_per_x: int,
    bank: ExpertWeights,
    top_k: int,
    sorted_pairs: Tensor,
    tile_experts: Tensor,
    num_tiles: Tensor,
    out: Tensor,
    tile: WideTile,
    *,
    pair_weights: Tensor | None = None,
    pieces: Tensor | None = None,
    options: tuple[str, ...] = (),
) -> None:
    """One projection of all pairs, into `out` (pairs, rows) bfloat16, and of the shared expert's pieces into `pieces`.

    Without pair_weights: up, with its squared ReLU; with them: down, weighted. Row p // pairs_per_x of x belongs to
    pair p. sorted_pairs, tile_experts, num_tiles: tiles of tile.tokens pairs, as of `experts.align`.
    """
    num_experts, num_rows, words = bank.codes.shape
    flags = _RELU_SQUARED if pair_weights is None else 0
    most_items = tile_experts.numel() * triton.cdiv(num_rows, _UNIT * tile.units)
    function(EXPERTS, options).launch(
        (min(num_sms(), most_items), 1, 1),
        (THREADS, 1, 1),
        (
            x, x.stride(0), bank.codes, bank.block_scales, bank.scale, sorted_pairs, tile_experts, num_tiles,
            pair_weights, out, pieces, counter(x.device, "wgmma"), 1.0, 1.0, len(out), pairs_per_x,
            top_k + bank.num_shared, bank.num_shared, num_experts - bank.num_shared, num_rows, x.shape[1], 4 * words,
            *tile, flags,
        ),
        shared_bytes=SHARED_BYTES,
        pdl=uses_pdl(),
    )  # fmt: skip


def experts_tile(num_tokens: int, top_k: int, bank: ExpertWeights) -> WideTile:
    """The tile for pairs that spread evenly."""
    per_expert = pairs_per_expert(num_tokens, top_k, bank)
    if per_expert >= LEAST_PAIRS:
        return MANY
    tokens = next(width for width in _WIDTHS if per_expert <= width)
    tiles = min(len(bank.codes), num_tokens * (top_k + bank.num_shared))
    return min((WideTile(tokens, units) for units in (2, 1)), key=lambda tile: cost(tile, tiles, bank.codes.shape[1]))


def linear_tile(num_tokens: int, num_rows: int, steps: int, invariant: bool = False) -> WideTile | SplitTile:
    """The tile with which the last blocks are done first. steps: of 128 columns; invariant: none shares them out."""
    items = triton.cdiv(num_tokens, MANY.tokens) * triton.cdiv(num_rows, _UNIT * MANY.units)
    if invariant or 2 * items > num_sms():
        tiles = (WideTile(tokens, units) for units in (2, 1) for tokens in reversed(_WIDTHS))
        return min(tiles, key=lambda tile: cost(tile, triton.cdiv(num_tokens, tile.tokens), num_rows))
    return min(split_tiles(steps), key=lambda tile: split_cost(tile, num_tokens, num_rows, steps))


def split_tiles(steps: int) -> list[SplitTile]:
    """All of them, for so many steps of 128 columns."""
    splits = range(1, min(_MOST_SPLITS, steps) + 1)
    return [SplitTile(tokens, rows, n) for n in splits for rows in _SPLIT_ROWS for tokens in reversed(_WIDTHS)]


def split_cost(tile: SplitTile, num_tokens: int, num_rows: int, steps: int) -> float:
    """Rounds of clusters, times microseconds of one, by what bounds each of its parts.

    A step's operands come from the L2 cache, 5.33 TB/s for all and 30.4 KB/us for one; its products take their time,
    too. Sums are exchanged at 35.3 KB/us. 1.06 us are the latency of the first operands and the result, 0.51 us the
    barriers of a cluster. Numbers fitted to an H200's times of 65 to 512 tokens: in 14 cases what this picks took 3 %
    longer than the best at most, but for one, 6 %.
    """
    sms, items = num_sms(), triton.cdiv(num_tokens, tile.tokens) * triton.cdiv(num_rows, tile.rows)
    # Processors come in groups of 16 or 18, and a cluster stays in one.
    at_once = sms // tile.splits if tile.splits <= 2 else sms // 16 * (16 // tile.splits)
    bytes_per_us = min(30.4e3, 5.33e6 / (min(items, at_once) * tile.splits))
    tokens = min(tile.tokens, 32 * triton.cdiv(num_tokens, 32))
    step = max((256 * tokens + 72 * tile.rows) / bytes_per_us, tile.rows / 256 * (1.04 + 0.0094 * tokens))
    took = 1.06 + triton.cdiv(steps, tile.splits) * step
    if tile.splits > 1:
        took += 0.51 + 4 * tokens * tile.rows * (1 - 1 / tile.splits) / 35.3e3
    return float(triton.cdiv(items, at_once) * took)


def cost(tile: WideTile, num_tiles: int, num_rows: int) -> float:
    """Of so many tiles of tokens: rounds of blocks, times microseconds of an item of 2688 columns, about, as an H200
    took them with 64 to 16384 tokens."""
    items = num_tiles * triton.cdiv(num_rows, _UNIT * tile.units)
    item = 18 + 0.15 * tile.tokens if tile.units == 2 else 14 + 0.1 * tile.tokens
    return float(triton.cdiv(items, num_sms()) * item)


def linear(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    num_rows: int,
    alpha: float,
    relu_squared: bool,
    out_scale: float | None,
    tile: WideTile | SplitTile | None = None,
    options: tuple[str, ...] = (),
    invariant: bool = False,
    early: bool = False,
) -> Tensor:
    """x (T, in) bfloat16 times one weight of `nvfp4.packed`: (T, num_rows) bfloat16, or e4m3 with out_scale.

    alpha: multiplies the accumulator, `nvfp4.REMAINDER` included. invariant: one order of summation for any T; columns
    are shared out otherwise, where that is faster. early: x is complete as soon as the kernel before this one lets this
    one begin, beside which it is read then, where columns are shared out.
    """
    num_tokens, columns = x.shape
    row_bytes = 4 * words.shape[1]
    tile = tile or linear_tile(num_tokens, num_rows, row_bytes // _GROUP_BYTES, invariant)
    dtype = x.dtype if out_scale is None else torch.float8_e4m3fn
    out = torch.empty(num_tokens, num_rows, dtype=dtype, device=x.device)
    flags = _RELU_SQUARED * relu_squared | _QUANTISED * (out_scale is not None)
    if isinstance(tile, SplitTile):
        items = triton.cdiv(num_tokens, tile.tokens) * triton.cdiv(num_rows, tile.rows)
        assert tile.splits <= row_bytes // _GROUP_BYTES, f"{tile} of {row_bytes // _GROUP_BYTES} steps"
        split_function(tile, (*options, *("-DEARLY",) * early)).launch(
            (items * tile.splits, 1, 1),
            (THREADS, 1, 1),
            (
                x, x.stride(0), words, scales, out, alpha, out_scale or 1.0, num_tokens, num_rows, columns, row_bytes,
                flags,
            ),
            shared_bytes=split_shared_bytes(tile),
            pdl=uses_pdl(),
        )  # fmt: skip
        return out
    items = triton.cdiv(num_tokens, tile.tokens) * triton.cdiv(num_rows, _UNIT * tile.units)
    function(LINEAR, options).launch(
        (min(num_sms(), items), 1, 1),
        (THREADS, 1, 1),
        (
            x, x.stride(0), words, scales, None, None, None, None, None, out, None, counter(x.device, "wgmma"), alpha,
            out_scale or 1.0, num_tokens, 1, 1, 0, 1, num_rows, columns, row_bytes, *tile, flags,
        ),
        shared_bytes=SHARED_BYTES,
        pdl=uses_pdl(),
    )  # fmt: skip
    return out
