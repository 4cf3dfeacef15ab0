"""What the order of weights in memory is worth: rows one after the other against tiles in one piece.

    PYTHONPATH=. python3 -m benchmarks.kernel_order [--small]

Products of a few tokens with many weights, FP8 and BF16, as the experts' grouped kernel makes them (rows of weights on
the wide side of a tensor core's product), and matrix times vector. With `tiles`, a weight is a sequence of tiles of 16
rows and 128 bytes of each, 2 KiB in one piece. The kernels differ in addresses alone; what a candidate's result differs
from the first one's is printed beside its time. --small: tiny sizes, for Triton's interpreter.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.kernel_experts import graph_time

TILE_ROWS, TILE_BYTES = 16, 128


@triton.jit
def _place(rows, columns, row_size, TILE_COLUMNS: tl.constexpr, TILED: tl.constexpr):
    """Offsets (rows, columns) of a weight's elements."""
    if TILED:
        first = (rows // 16 * (row_size * 16) + rows % 16 * TILE_COLUMNS)[:, None]
        return first + (columns // TILE_COLUMNS * (16 * TILE_COLUMNS) + columns % TILE_COLUMNS)[None, :]
    else:
        return rows[:, None] * row_size + columns[None, :]


@triton.jit
def _groups(
    x, codes, experts, y, num_rows, row_size: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """Tile p of PAIRS rows of x times ROWS rows of expert experts[p]."""
    tile = tl.program_id(1)
    expert = tl.load(experts + tile).to(tl.int64)
    codes += expert * num_rows * row_size
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pairs = tile * PAIRS + tl.arange(0, PAIRS)
    row = tl.minimum(rows, num_rows - 1)
    acc = tl.zeros((ROWS, PAIRS), tl.float32)
    for start in tl.range(0, row_size, COLUMNS, num_stages=STAGES):
        columns = start + tl.arange(0, COLUMNS)
        inside = columns < row_size
        weight = tl.load(codes + _place(row, columns, row_size, TILE_COLUMNS, TILED), mask=inside[None, :], other=0.0)
        values = tl.load(x + pairs[None, :] * row_size + columns[:, None], mask=inside[:, None], other=0.0)
        acc = tl.dot(weight, values, acc)
    tl.store(y + pairs[None, :] * num_rows + rows[:, None], acc, mask=(rows < num_rows)[:, None])


@triton.jit
def _vector(
    x, codes, y, num_rows, row_size: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(rows, num_rows - 1)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, row_size, COLUMNS, num_stages=STAGES):
        columns = start + tl.arange(0, COLUMNS)
        inside = columns < row_size
        weight = tl.load(codes + _place(row, columns, row_size, TILE_COLUMNS, TILED), mask=inside[None, :], other=0.0)
        values = tl.load(x + columns, mask=inside, other=0.0)
        acc += weight.to(tl.float32) * values.to(tl.float32)[None, :]
    tl.store(y + rows, tl.sum(acc, 1), mask=rows < num_rows)


def tiled(codes: Tensor) -> Tensor:
    """(..., rows, columns) in tiles; columns are a multiple of a tile's, rows of 16."""
    columns = TILE_BYTES // codes.element_size()
    *lead, rows, size = codes.shape
    raw = codes.view(torch.uint8) if codes.element_size() == 1 else codes
    shaped = raw.view(*lead, rows // TILE_ROWS, TILE_ROWS, size // columns, columns)
    return shaped.transpose(-3, -2).contiguous().view(codes.dtype).view(codes.shape)


def weights(dtype: torch.dtype, device: str, *shape: int) -> Tensor:
    return (torch.randn(*shape, device=device, dtype=torch.bfloat16) * 0.5).to(dtype)


Calls = dict[str, list[Callable[[], Tensor]]]


def compare(name: str, num_bytes: int, calls: Calls) -> None:
    """calls: of each candidate, on weights that together do not fit the L2 cache."""
    first: Tensor | None = None
    print(f"{name}: {num_bytes / 1e6:.0f} MB", flush=True)
    for label, each in calls.items():
        result = each[0]().double()
        first = result if first is None else first
        differs = float((result - first).norm() / first.norm())
        if not torch.cuda.is_available():
            print(f"    {label:34} differs {differs:.1e}")
            continue
        seconds = graph_time([*each, *each])
        print(
            f"    {label:34} {seconds * 1e6:8.1f} us  {num_bytes / seconds / 1e12:5.2f} TB/s  differs {differs:.1e}",
            flush=True,
        )


def groups(x: Tensor, codes: Tensor, experts: Tensor, shape: tuple[int, ...], is_tiled: bool) -> Tensor:
    rows, pairs, columns, warps, stages = shape
    num_rows, row_size = codes.shape[1:]
    y = torch.empty(len(x), num_rows, dtype=torch.float32, device=x.device)
    _groups[triton.cdiv(num_rows, rows), len(experts)](
        x, codes, experts, y, num_rows, row_size=row_size, ROWS=rows, PAIRS=pairs, COLUMNS=columns, STAGES=stages,
        TILE_COLUMNS=TILE_BYTES // codes.element_size(), TILED=is_tiled, num_warps=warps,
    )  # fmt: skip
    return y


def vector(x: Tensor, codes: Tensor, shape: tuple[int, ...], is_tiled: bool) -> Tensor:
    rows, columns, warps, stages = shape
    num_rows, row_size = codes.shape
    y = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    _vector[(triton.cdiv(num_rows, rows),)](
        x, codes, y, num_rows, row_size=row_size, ROWS=rows, COLUMNS=columns, STAGES=stages,
        TILE_COLUMNS=TILE_BYTES // codes.element_size(), TILED=is_tiled, num_warps=warps,
    )  # fmt: skip
    return y


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true")
    is_small = parser.parse_args().small
    device = "cuda" if torch.cuda.is_available() else "cpu"
    begin = time.perf_counter()
    torch.manual_seed(0)
    num_experts, num_rows, row_size = (3, 48, 256) if is_small else (122, 1856, 2688)
    for dtype, shapes in (
        (torch.float8_e4m3fn, ((128, 16, 128, 8, 4), (64, 16, 128, 4, 4), (64, 16, 256, 4, 3), (64, 64, 128, 4, 4))),
        (torch.bfloat16, ((64, 16, 64, 4, 4), (128, 16, 64, 8, 4), (64, 16, 128, 4, 4), (64, 64, 64, 4, 4))),
    ):
        banks = [weights(dtype, device, num_experts, num_rows, row_size) for _ in range(2)]
        orders = {"rows": banks, "tiles": [tiled(bank) for bank in banks]}
        experts = torch.arange(num_experts, device=device, dtype=torch.int32)
        calls: Calls = {}
        for shape in shapes[:1] if is_small else shapes:
            x = weights(dtype, device, num_experts * shape[1], row_size)
            if shape[1] != shapes[0][1]:
                calls = {}
            for order, both in orders.items():
                each = [partial(groups, x, bank, experts, shape, order == "tiles") for bank in both]
                calls[f"{order} {shape}"] = [*each]
            if shape in (shapes[0] if is_small else shapes[2], shapes[-1]):
                compare(f"{dtype}, {num_experts} experts, {shape[1]} pairs each", banks[0].nbytes, calls)
        del banks, orders
    for dtype, size, shapes in (
        (torch.float8_e4m3fn, (10304, 2688), ((4, 512, 4, 3), (8, 256, 2, 3), (16, 128, 4, 4), (16, 256, 4, 3))),
        (torch.bfloat16, (4096, 2688), ((4, 512, 4, 3), (8, 256, 4, 3), (16, 64, 4, 4), (16, 128, 4, 3))),
    ):
        size = (48, 256) if is_small else size
        many = weights(dtype, device, 2 if is_small else 16, *size)
        x = weights(dtype, device, size[1])
        calls = {}
        for shape in shapes:
            for order, bank in (("rows", many), ("tiles", tiled(many))):
                calls[f"{order} {shape}"] = [partial(vector, x, codes, shape, order == "tiles") for codes in bank]
        compare(f"{dtype}, {size[0]} x {size[1]} times a vector", many[0].nbytes, calls)
    print(f"{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
