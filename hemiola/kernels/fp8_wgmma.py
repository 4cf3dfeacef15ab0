"""Some tokens times FP8 weights on Hopper, in CUDA C++. See fp8_wgmma.cu.

Weights are e4m3 codes, row by row, as cuBLAS takes them, too. A block has as many rows of them as make even shares for
a GPU. Against the traffic of x, which all blocks read, a cluster of blocks fetches it together, or takes more rows and
shares out the columns; then it adds its sums in the order of the blocks. Bits depend on the number of these alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from hemiola.kernels.cuda import CudaFunction, CudaModule, tensor_map
from hemiola.kernels.launch import capability, num_sms, uses_pdl

KERNEL = "fp8_wgmma_kernel"
STEP = 128
"""Columns."""

LEAST_TOKENS, MOST_TOKENS = 3, 128
"""For which it is faster than cuBLAS."""

_RELU_SQUARED, _QUANTISED = 1, 4
_WIDTHS = (8, 16, 32, 64, 96, 128, 192, 256)
_SHARED_BYTES, _SHARED_OF_TWO = 227 << 10, 113 << 10  # of a block, of each of two
_MOST_STAGES = 24


class Tile(NamedTuple):
    """tokens, rows: of a block, multiples of 8 up to 256. splits: blocks of a cluster, up to eight, which share out the
    columns. share: blocks of a cluster that take as many tiles of rows, and fetch x together; tokens is a multiple of 8
    times it then, and splits is one."""

    tokens: int
    rows: int
    splits: int
    share: int
    stages: int


def wgmma(rows: int) -> str:
    """The wgmma of 64 tokens and so many rows of weights, both in shared memory, as a CUDA function."""
    size = rows // 2
    sums = ", ".join(f"%{i}" for i in range(size))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(size))
    return f"""
__device__ __forceinline__ void product(float (&d)[{size}], unsigned long long a, unsigned long long b) {{
    asm volatile("{{.reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n{rows}k32.f32.e4m3.e4m3 "
                 "{{{sums}}}, %{size}, %{size + 1}, p, 1, 1;}}" : {outputs} : "l"(a), "l"(b));
}}"""


@cache
def source(rows: int) -> str:
    return f"{wgmma(rows)}\n#line 1\n{Path(__file__).with_suffix('.cu').read_text(encoding='utf-8')}"


@cache
def function(tile: Tile, options: tuple[str, ...] = ()) -> CudaFunction:
    sizes = tuple(f"-D{name.upper()}={value}" for name, value in tile._asdict().items())
    return CudaModule(source(tile.rows), (*sizes, *options)).function(KERNEL, "TTPffiiii")


def shared_bytes(tile: Tile) -> int:
    """As the constants of fp8_wgmma.cu have it."""
    ring = tile.stages * STEP * (tile.tokens + tile.rows)
    pitch: int = (triton.cdiv(tile.rows // 8, tile.splits) | 1) * 8
    sums = tile.splits * tile.tokens * pitch * 4
    return 1024 + (ring + sums if tile.splits > 1 else max(ring, sums)) + 16 * tile.stages


def takes(x: Tensor, codes: Tensor) -> bool:
    """Whether `linear` is for these tokens and this weight, and can read and write them."""
    return (
        LEAST_TOKENS <= len(x) <= MOST_TOKENS
        and capability() == 90
        and x.dtype == codes.dtype == torch.float8_e4m3fn
        and x.shape[1] > 0
        and all(t.shape[1] % 16 == 0 and t.stride() == (t.stride(0), 1) for t in (x, codes))
        and all(t.stride(0) % 16 == 0 and t.stride(0) >= t.shape[1] and t.data_ptr() % 16 == 0 for t in (x, codes))
        and len(codes) > 0
        and len(codes) % 8 == 0
    )


def tiles(num_tokens: int, steps: int) -> Iterator[Tile]:
    """Those for so many tokens and steps of 128 columns; with as many stages as there is room for, for one block of a
    multiprocessor and for two."""
    whole = next((width for width in _WIDTHS if num_tokens <= width), _WIDTHS[-1])
    clusters = ((1, 1), (1, 2), (1, 4), *((n, 1) for n in range(2, 9)))
    for tokens, (splits, share) in product(sorted({whole, *(n for n in (64, 128) if n < whole)}), clusters):
        if splits > steps or tokens % (8 * share):
            continue
        for rows in range(16, 209 if tokens <= 128 else 129, 8):
            if rows // 8 < splits:
                continue
            for room in (_SHARED_BYTES, _SHARED_OF_TWO):
                one = Tile(tokens, rows, splits, share, 0)
                each = shared_bytes(one._replace(stages=1000)) - shared_bytes(one._replace(stages=999))
                fixed = shared_bytes(one) if splits > 1 else 1024
                stages = min((room - fixed) // each, triton.cdiv(steps, splits), _MOST_STAGES)
                tile = one._replace(stages=stages)
                # Rows past the tokens of a product are in the ring, too.
                overhang = (-tokens % 64) * STEP
                fits = stages >= min(3, triton.cdiv(steps, splits)) and stages * rows * STEP >= overhang
                if fits and shared_bytes(tile) <= room:
                    yield tile


def linear_tile(num_tokens: int, num_rows: int, steps: int) -> Tile:
    """The tile with which `cost` is done first, of a few for all numbers of tokens. steps: of 128 columns."""
    most = next((width for width in _WIDTHS if num_tokens <= width), triton.cdiv(num_tokens, 128) * 128)
    return _tile(most, num_rows, steps)


@cache
def _tile(num_tokens: int, num_rows: int, steps: int) -> Tile:
    return min(tiles(num_tokens, steps), key=lambda tile: cost(tile, num_tokens, num_rows, steps))


def cost(tile: Tile, num_tokens: int, num_rows: int, steps: int) -> float:
    """Rounds of clusters, times microseconds of one, by what bounds each of its parts on an H200.

    Weights come at 4.2 TB/s from memory, all operands at 5.5 TB/s from the L2 cache, if most multiprocessors ask; a
    block's at 80 KB/us at most and as what is under way takes 1 us. 1.5 us are the latency of the first operands and of
    the result, 0.8 us the barriers of a cluster that exchanges sums, at 40 KB/us. None of it was measured with this
    kernel yet.
    """
    sms, size = num_sms(), tile.splits * tile.share
    token_tiles = triton.cdiv(num_tokens, tile.tokens)
    clusters = token_tiles * triton.cdiv(num_rows, tile.rows * tile.share)
    # Processors come in groups of 16 or 18, and a cluster stays in one.
    resident = min(2, _SHARED_BYTES // shared_bytes(tile))
    at_once = resident * sms // size if size <= 2 else sms // 16 * (16 * resident // size)
    rounds = triton.cdiv(clusters, at_once)
    blocks = min(clusters, at_once) * size
    tokens = min(num_tokens, tile.tokens)
    own_steps = triton.cdiv(steps, tile.splits)
    weight_bytes, x_bytes = STEP * tile.rows * own_steps, STEP * tokens * own_steps / tile.share
    # As evenly as blocks fall to processors.
    most = triton.cdiv(blocks, sms)
    under_way = tile.stages * STEP * tile.rows
    asking = min(1.0, blocks / (0.95 * sms))
    stream = max(
        blocks * weight_bytes / (4.2e6 * asking),
        blocks * (weight_bytes + x_bytes) / (5.5e6 * asking),
        most * (weight_bytes + x_bytes) / 80e3,
        weight_bytes / under_way,
    )
    products = most * own_steps * 4 * max(tile.rows / 2, 24) * triton.cdiv(tile.tokens, 64) / 1.7e3
    took = 1.5 + max(stream, products)
    if tile.splits > 1:
        took += 0.8 + 4 * tokens * tile.rows * (1 - 1 / tile.splits) / 40e3
    if tile.share > 1:
        took += 0.3
    return float(rounds * took)


def linear(
    x: Tensor,
    codes: Tensor,
    scale: float,
    relu_squared: bool = False,
    out_scale: float | None = None,
    tile: Tile | None = None,
    options: tuple[str, ...] = (),
) -> Tensor:
    """(x @ codes^T) * scale, finished as `hemiola.kernels.quantize` says.

    x: (T, in), codes: (out, in), e4m3, laid out as `takes` wants them. Returns (T, out) bfloat16, or e4m3 with
    out_scale.
    """
    (num_tokens, columns), num_rows = x.shape, len(codes)
    steps = triton.cdiv(columns, STEP)
    tile = tile or linear_tile(num_tokens, num_rows, steps)
    assert tile.splits <= steps, f"{tile} of {steps} steps"
    assert tile.stages > 1 or tile.splits == steps, "a stage is free once the products of the next one are under way"
    dtype = torch.bfloat16 if out_scale is None else torch.float8_e4m3fn
    out = torch.empty(num_tokens, num_rows, dtype=dtype, device=x.device)
    clusters = triton.cdiv(num_tokens, tile.tokens) * triton.cdiv(num_rows, tile.rows * tile.share)
    function(tile, options).launch(
        (clusters * tile.splits * tile.share, 1, 1),
        (128 * triton.cdiv(tile.tokens, 64) + 64, 1, 1),
        (
            tensor_map(x, tile.tokens // tile.share), tensor_map(codes, tile.rows), out, scale,
            1.0 if out_scale is None else out_scale, num_tokens, num_rows, steps,
            _RELU_SQUARED * relu_squared | _QUANTISED * (out_scale is not None),
        ),
        shared_bytes=shared_bytes(tile),
        pdl=uses_pdl(),
    )  # fmt: skip
    return out
