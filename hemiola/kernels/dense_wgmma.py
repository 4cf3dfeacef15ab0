"""A few tokens times FP8 or bfloat16 weights on Hopper, in CUDA C++. See dense_wgmma.cu.

Weights lie row by row, as cuBLAS takes them, too. A block has as many rows of them as make even shares for a GPU; where
those would be few, a cluster of blocks takes more rows and shares out the columns, and adds its sums in the order of
the blocks. Bits depend on the number of these alone.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from hemiola.kernels.cuda import CudaFunction, CudaModule, source_of, tensor_map
from hemiola.kernels.launch import capability, num_sms, uses_pdl

KERNEL = "dense_wgmma_kernel"
STEP = 128
"""Bytes of a row."""

LEAST_TOKENS, MOST_TOKENS = 3, 64
"""For which it is faster than cuBLAS."""

_RELU_SQUARED, _QUANTISED, _EARLY = 1, 4, 8
WIDTHS = (8, 16, 32, 64, 128)  # tokens of a block
_SPLITS = (1, 2, 4, 8)
_FEW, _ENOUGH_ROWS, _MOST_ROWS = 16, (64, 48), 256  # enough for few tokens, and for more
# Of a block: with another one on its multiprocessor, so that the next launch begins to fetch its weights, or alone.
SHARED_BYTES = (113 << 10, 227 << 10)
_X_BYTES = 32 << 10  # of the ring of x
_MOST_STAGES = 24
_PRODUCTS = {torch.float8_e4m3fn: ("k32.f32.e4m3.e4m3", ""), torch.bfloat16: ("k16.f32.bf16.bf16", ", 0, 0")}


class Tile(NamedTuple):
    """tokens: of a block, a multiple of 8. rows: a multiple of 8 up to 256. splits: blocks of a cluster, up to eight,
    which share out the columns. stages, x_stages: steps of weights, and of x, that are under way."""

    tokens: int
    rows: int
    splits: int
    stages: int
    x_stages: int


def wgmma(rows: int, dtype: torch.dtype) -> str:
    """The wgmma of 64 tokens and so many rows of weights, both in shared memory, as a CUDA function."""
    size, (kind, orders) = rows // 2, _PRODUCTS[dtype]
    sums = ", ".join(f"%{i}" for i in range(size))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(size))
    return f"""
__device__ __forceinline__ void product(float (&d)[{size}], unsigned long long a, unsigned long long b) {{
    asm volatile("{{.reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n{rows}{kind} "
                 "{{{sums}}}, %{size}, %{size + 1}, p, 1, 1{orders};}}" : {outputs} : "l"(a), "l"(b));
}}"""


@cache
def source(rows: int, dtype: torch.dtype) -> str:
    return f"{wgmma(rows, dtype)}\n{source_of('wgmma.cuh', 'dense_wgmma.cu')}"


@cache
def function(tile: Tile, dtype: torch.dtype, options: tuple[str, ...] = ()) -> CudaFunction:
    sizes = tuple(f"-D{name.upper()}={value}" for name, value in tile._asdict().items())
    return CudaModule(source(tile.rows, dtype), (*sizes, *options)).function(KERNEL, "TTPffiiii")


def shared_bytes(tile: Tile) -> int:
    """As the constants of dense_wgmma.cu have it."""
    ring = STEP * (tile.x_stages * tile.tokens + tile.stages * tile.rows)
    pitch: int = (triton.cdiv(tile.rows // 8, tile.splits) | 1) * 8
    sums = tile.splits * tile.tokens * pitch * 4
    return 1024 + (ring + sums if tile.splits > 1 else max(ring, sums)) + 16 * (tile.stages + tile.x_stages)


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` is for these tokens and this weight, and can read and write them."""
    if not (capability() == 90 and x.dtype == weight.dtype and x.dtype in _PRODUCTS):
        return False
    item = x.dtype.itemsize
    return (
        LEAST_TOKENS <= len(x) <= MOST_TOKENS
        and x.shape[1] > 0
        and all(item * t.shape[1] % 16 == 0 and t.stride() == (t.stride(0), 1) for t in (x, weight))
        and all(item * t.stride(0) % 16 == 0 and t.stride(0) >= t.shape[1] for t in (x, weight))
        and all(t.data_ptr() % 16 == 0 for t in (x, weight))
        and 0 < len(weight) <= _MOST_ROWS * num_sms()
        and len(weight) % 8 == 0
        and linear_tile(len(x), len(weight), triton.cdiv(item * x.shape[1], STEP)) is not None
    )


@cache
def linear_tile(num_tokens: int, num_rows: int, steps: int) -> Tile | None:
    """A block a multiprocessor, of the fewest splits with enough rows each, and as many stages as there is room for.

    steps: of 128 bytes. None where no tile fits.
    """
    tokens = next((width for width in WIDTHS if num_tokens <= width), None)
    if tokens is None:
        return None
    even = {splits: even_rows(num_rows, splits) for splits in _SPLITS if splits <= steps}
    enough = _ENOUGH_ROWS[tokens > _FEW]
    splits = next((splits for splits, rows in even.items() if rows >= enough), max(even))
    rows = min(max(even[splits], 16, 8 * splits), _MOST_ROWS)
    fitting = (fitted(tokens, rows, splits, steps, room) for room in SHARED_BYTES)
    return next((tile for tile in fitting if tile), None)


def even_rows(num_rows: int, splits: int) -> int:
    """Rows of a block, so that as many blocks as there are multiprocessors have all."""
    return -(-num_rows // (num_sms() // splits * 8)) * 8


def fitted(tokens: int, rows: int, splits: int, steps: int, room: int, x_bytes: int = _X_BYTES) -> Tile | None:
    """With as many stages as `room` bytes hold, of which x_bytes are those of x; None where they are too few."""
    own_steps = triton.cdiv(steps, splits)
    tile = Tile(tokens, rows, splits, 0, min(x_bytes // (STEP * tokens), own_steps))
    fixed = shared_bytes(tile) if splits > 1 else shared_bytes(tile._replace(rows=0))
    tile = tile._replace(stages=min((room - fixed) // (STEP * rows + 16), own_steps, _MOST_STAGES))
    # Rows past the tokens of a product are in the rings, too.
    fits = tile.stages >= min(3, own_steps) and tile.stages * rows >= -tokens % 64
    return tile if fits and shared_bytes(tile) <= room else None


def linear(
    x: Tensor,
    weight: Tensor,
    scale: float = 1.0,
    relu_squared: bool = False,
    out_scale: float | None = None,
    tile: Tile | None = None,
    options: tuple[str, ...] = (),
    early: bool = False,
) -> Tensor:
    """(x @ weight^T) * scale, finished as `hemiola.kernels.quantize` says.

    x: (T, in), weight: (out, in), both e4m3 or both bfloat16, laid out as `takes` wants them. early: x is complete as
    soon as the kernel before this one lets this one begin, and this one runs beside it. Returns (T, out) bfloat16, or
    e4m3 with out_scale.
    """
    (num_tokens, columns), num_rows = x.shape, len(weight)
    steps = triton.cdiv(columns * x.dtype.itemsize, STEP)
    tile = tile or linear_tile(num_tokens, num_rows, steps)
    assert tile, f"no tile for {num_tokens} tokens and {num_rows} rows of {steps} steps"
    assert num_tokens <= tile.tokens, f"{tile} for {num_tokens} tokens"
    assert tile.splits <= steps, f"{tile} of {steps} steps"
    assert min(tile.stages, tile.x_stages) > 1 or tile.splits == steps, (
        "a stage is free once the products of the next one are under way"
    )
    dtype = torch.bfloat16 if out_scale is None else torch.float8_e4m3fn
    out = torch.empty(num_tokens, num_rows, dtype=dtype, device=x.device)
    flags = _RELU_SQUARED * relu_squared | _QUANTISED * (out_scale is not None) | _EARLY * early
    function(tile, x.dtype, options).launch(
        (triton.cdiv(num_rows, tile.rows) * tile.splits, 1, 1),
        (128 * triton.cdiv(tile.tokens, 64) + 64, 1, 1),
        (
            tensor_map(x.view(torch.uint8), tile.tokens), tensor_map(weight.view(torch.uint8), tile.rows), out, scale,
            1.0 if out_scale is None else out_scale, num_tokens, num_rows, steps, flags,
        ),
        shared_bytes=shared_bytes(tile),
        pdl=uses_pdl(),
    )  # fmt: skip
    return out
