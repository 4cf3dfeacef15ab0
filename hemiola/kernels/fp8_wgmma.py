"""A few tokens times FP8 weights on Hopper, in CUDA C++. See fp8_wgmma.cu.

Weights are e4m3 codes, row by row, as cuBLAS takes them, too. A block has as many rows of them as make even shares for
a GPU; where those would be few, a cluster of blocks takes more rows and shares out the columns, and adds its sums in
the order of the blocks. Bits depend on the number of these alone.

On an H200 the best tiles took 9.43 to 9.79 us for 4 to 32 tokens of 10304 x 2688, cuBLAS 9.83 to 10.50; and 5.88 to
6.30 us of 2688 x 4096, cuBLAS 6.51 to 6.70. More tokens are cuBLAS's, which is as fast there.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from hemiola.kernels.cuda import CudaFunction, CudaModule, source_of, tensor_map
from hemiola.kernels.launch import capability, num_sms, uses_pdl

KERNEL = "fp8_wgmma_kernel"
STEP = 128
"""Columns."""

LEAST_TOKENS, MOST_TOKENS = 3, 32
"""For which it is faster than cuBLAS."""

_RELU_SQUARED, _QUANTISED = 1, 4
_WIDTHS = (8, 16, 32, 64)
_SPLITS = (1, 2, 4, 8)
_ENOUGH_ROWS, _MOST_ROWS = 64, 256
# Of a block: with another one on its multiprocessor, so that the next launch begins to fetch its weights, or alone.
_SHARED_BYTES = (113 << 10, 227 << 10)
_MOST_STAGES = 24


class Tile(NamedTuple):
    """tokens: of a block, a multiple of 8 up to 64. rows: a multiple of 8 up to 256. splits: blocks of a cluster, up to
    eight, which share out the columns."""

    tokens: int
    rows: int
    splits: int
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
    return f"{wgmma(rows)}\n{source_of('wgmma.cuh', 'fp8_wgmma.cu')}"


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
        and linear_tile(len(x), len(codes), triton.cdiv(x.shape[1], STEP)) is not None
    )


@cache
def linear_tile(num_tokens: int, num_rows: int, steps: int) -> Tile | None:
    """A block a multiprocessor, of the fewest splits with enough rows each, and as many stages as there is room for.

    steps: of 128 columns. None where no tile fits.
    """
    tokens = next((width for width in _WIDTHS if num_tokens <= width), None)
    if tokens is None:
        return None
    even = {splits: triton.cdiv(num_rows, num_sms() // splits * 8) * 8 for splits in _SPLITS if splits <= steps}
    splits = next((splits for splits, rows in even.items() if rows >= _ENOUGH_ROWS), max(even))
    tile = Tile(tokens, min(max(even[splits], 16, 8 * splits), _MOST_ROWS), splits, 0)
    own_steps = triton.cdiv(steps, splits)
    fixed = shared_bytes(tile) if splits > 1 else 1024
    each = STEP * (tokens + tile.rows) + 16
    for room in _SHARED_BYTES:
        tile = tile._replace(stages=min((room - fixed) // each, own_steps, _MOST_STAGES))
        # Rows past the tokens of a product are in the ring, too.
        fits = tile.stages >= min(3, own_steps) and tile.stages * tile.rows >= 64 - tokens
        if fits and shared_bytes(tile) <= room:
            return tile
    return None


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
    assert tile, f"no tile for {num_tokens} tokens and {num_rows} rows of {steps} steps"
    assert num_tokens <= tile.tokens, f"{tile} for {num_tokens} tokens"
    assert tile.splits <= steps, f"{tile} of {steps} steps"
    assert tile.stages > 1 or tile.splits == steps, "a stage is free once the products of the next one are under way"
    dtype = torch.bfloat16 if out_scale is None else torch.float8_e4m3fn
    out = torch.empty(num_tokens, num_rows, dtype=dtype, device=x.device)
    function(tile, options).launch(
        (triton.cdiv(num_rows, tile.rows) * tile.splits, 1, 1),
        (192, 1, 1),
        (
            tensor_map(x, tile.tokens), tensor_map(codes, tile.rows), out, scale,
            1.0 if out_scale is None else out_scale, num_tokens, num_rows, steps,
            _RELU_SQUARED * relu_squared | _QUANTISED * (out_scale is not None),
        ),
        shared_bytes=shared_bytes(tile),
        pdl=uses_pdl(),
    )  # fmt: skip
    return out
