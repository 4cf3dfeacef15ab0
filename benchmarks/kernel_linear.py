"""Time of the linears' kernels on a GPU, candidate tiles against each other and against torch: the tables' evidence.

    python -m benchmarks.kernel_linear [--only nvfp4] [--tokens 1,8] [--behind-norm]

Each figure is the median of replays of a CUDA graph of calls that take turns over enough weights to defeat the L2
cache, launched as in a model: one behind the other, with programmatic dependent launch where ours are concerned.
--behind-norm: a norm of as many rows runs before each. Its time is in the figure, but for what a kernel does beside it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from hemiola.kernels import dense_wgmma, linear_dense, linear_nvfp4, nvfp4
from hemiola.kernels.linear_dense import GemvTile
from hemiola.kernels.rms_norm import rms_norm
from hemiola.kernels.split_k import DotTile, split

BYTES_TO_ROTATE = 150e6
REPLAYS = 5
TOKENS = (1, 2, 4, 8, 32, 64, 128, 256, 8192)
WORKERS = 12
TIGHT = 1.15  # a candidate is printed if it is within this of the best

SHAPES = {
    "fp8": {"in_proj": (10304, 2688), "out_proj": (2688, 4096)},
    "nvfp4": {"shared up": (3712, 2688), "shared down": (2688, 3712), "lm_head": (131072, 2688)},
    "bf16": {"q": (4096, 2688), "kv": (256, 2688), "o": (2688, 4096), "lm_head": (131072, 2688)},
}

HIDDEN = 2688  # what the norm before a linear has

Tile = GemvTile | DotTile | dense_wgmma.Tile | str


def wgmma_tiles(tokens: int, out_size: int, row_bytes: int) -> Iterator[dense_wgmma.Tile]:
    """Even shares of a GPU, one to four blocks a cluster, in half of a multiprocessor's memory and in all of it."""
    width = next(width for width in dense_wgmma.WIDTHS if tokens <= width)
    steps = triton.cdiv(row_bytes, dense_wgmma.STEP)
    for splits, x_stages, room in product((1, 2, 4), (2, 4, 8, 16, 32), dense_wgmma.SHARED_BYTES):
        rows, x_bytes = dense_wgmma.even_rows(out_size, splits), x_stages * dense_wgmma.STEP * width
        if 16 <= rows <= 256 and (tile := dense_wgmma.fitted(width, rows, splits, steps, room, x_bytes)):
            yield tile


def candidates(scheme: str, tokens: int, out_size: int, in_size: int) -> Iterator[Tile]:
    """Tiles that may be right for so many tokens; a name stands for torch's product, with its epilogue apart."""
    is_large = out_size > 100_000
    if scheme != "nvfp4":
        yield "torch"
    if scheme != "nvfp4" and dense_wgmma.LEAST_TOKENS <= tokens <= 128 and not is_large:
        yield from dict.fromkeys(wgmma_tiles(tokens, out_size, in_size * (2 if scheme == "bf16" else 1)))
    if scheme != "nvfp4" and tokens <= 4:
        vector = 16 if scheme == "fp8" else 8
        for warps, columns in ((4, 512), (4, 1024), (4, 2048), (2, 512), (8, 1024)):
            if rows := warps * 32 * vector // columns:
                yield GemvTile(rows, columns, warps)
        yield GemvTile(8 if scheme == "fp8" else 4, 512, 4)
    columns = 64 if scheme == "bf16" else 128
    programs = (0,) if is_large else (0, 264, 396, 528, 792)
    if tokens <= 8:
        for p in programs:
            yield DotTile(64, 16, columns, 5, 4, p)
        yield DotTile(64, 16, 2 * columns, 4, 4, programs[-2:][0])
        yield DotTile(128, 16, columns, 5, 4, programs[-3:][0])
        yield DotTile(128, 16, columns, 5, 8, programs[-3:][0])
    elif tokens <= 64:
        for p in programs[:4]:
            yield DotTile(64, tokens, columns, 4, 4, p)
        for p in programs[:3]:
            yield DotTile(128, tokens, columns, 4, 4, p)
            yield DotTile(128, tokens, columns, 4, 8, p)
    elif tokens <= 256:
        for p in programs[:4]:
            yield DotTile(64, 128, 64, 4, 4, p)
            yield DotTile(128, 128, 64, 4, 8, p)
        for p in programs[:2]:
            yield DotTile(64, 128, 128, 3, 4, p)
            yield DotTile(128, 128, 128, 3, 8, p)
            yield DotTile(128, 64, 128, 3, 4, p)
            yield DotTile(128, 256, 64, 3, 8, p)
    elif scheme == "nvfp4" and not is_large:
        yield DotTile(128, 128, 64, 4, 8)
        yield DotTile(128, 256, 64, 3, 8)


class Case(NamedTuple):
    scheme: str
    name: str
    tokens: int
    tile: Tile


def cases(only: str | None, tokens: tuple[int, ...]) -> list[Case]:
    return [
        Case(scheme, name, count, tile)
        for scheme, shapes in SHAPES.items()
        if only in (None, scheme)
        for name, (out_size, in_size) in shapes.items()
        for count in tokens
        if not (out_size > 100_000 and count > 256)  # of a prompt, only last rows have logits
        for tile in candidates(scheme, count, out_size, in_size)
    ]


def kernel_of(case: Case) -> tuple[object, ...]:
    """What the case's kernel is specialised for: cases that share it compile once."""
    out_size, in_size = SHAPES[case.scheme][case.name]
    if isinstance(case.tile, GemvTile):
        return case.scheme, in_size, case.tokens, case.tile
    if isinstance(case.tile, dense_wgmma.Tile):
        return case.scheme, case.tile
    assert isinstance(case.tile, DotTile)
    splits = split(case.tile, out_size, case.tokens, in_size, torch.device("meta")).grid[2]
    is_even = in_size % case.tile.columns == 0
    return case.scheme, case.name == "shared up", is_even, case.tile._replace(programs=splits > 1)


def weights(scheme: str, out_size: int, in_size: int, rotating: bool) -> list[tuple[Tensor, ...]]:
    """Random weights of one shape, in the form that kernels read."""
    bits = {"fp8": 8, "nvfp4": 5, "bf16": 16}[scheme]
    count = max(1, min(16, round(BYTES_TO_ROTATE / (out_size * in_size * bits / 8)))) if rotating else 1
    made: list[tuple[Tensor, ...]] = []
    for _ in range(count):
        if scheme == "bf16":
            made.append((torch.randn(out_size, in_size, device="cuda", dtype=torch.bfloat16) * in_size**-0.5,))
        elif scheme == "fp8":
            codes = torch.randint(0, 0x78, (out_size, in_size), device="cuda", dtype=torch.uint8)
            made.append((codes.view(torch.float8_e4m3fn), torch.ones(1, device="cuda")))
        else:
            data = torch.randint(0, 256, (out_size, in_size // 2), device="cuda", dtype=torch.uint8)
            scales = torch.randint(0x28, 0x40, (out_size, in_size // 16), device="cuda", dtype=torch.uint8)
            made.append(nvfp4.packed(data, scales.view(torch.float8_e4m3fn)))
    return made


def call(case: Case, x: Tensor, weight: tuple[Tensor, ...]) -> Tensor:
    """One product, as the launcher would make it with this tile."""
    relu = case.name == "shared up"
    if case.scheme == "nvfp4":
        assert isinstance(case.tile, DotTile), "NVFP4 weights are decoded in tiles"
        return linear_nvfp4.dot(x, *weight, len(weight[0]), 1.0, relu, None, case.tile)
    if isinstance(case.tile, GemvTile):
        return linear_dense.gemv(x, weight[0], 0.1, False, None, case.tile)
    if isinstance(case.tile, DotTile):
        return linear_dense.dot(x, weight[0], 0.1, False, None, case.tile)
    if isinstance(case.tile, dense_wgmma.Tile):
        return dense_wgmma.linear(x, weight[0], 0.1, tile=case.tile)
    if case.scheme == "bf16":
        return torch.nn.functional.linear(x, weight[0])
    one = weight[1]
    return torch._scaled_mm(x, weight[0].T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def activations(case: Case, in_size: int) -> Tensor:
    x = torch.randn(case.tokens, in_size, device="cuda", dtype=torch.bfloat16)
    return x.to(torch.float8_e4m3fn) if case.scheme == "fp8" else x


def attempt(run: Callable[[], object]) -> str:
    """What stands in the way of a candidate, such as shared memory that there is not; empty if nothing does."""
    try:
        run()
    except (triton.runtime.errors.OutOfResources, triton.CompilationError) as refused:
        return str(refused).splitlines()[0]
    return ""


def compile_cases(todo: list[Case]) -> list[str]:
    """In a worker: each kernel once, so that it is in Triton's cache."""
    found = []
    for case in todo:
        out_size, in_size = SHAPES[case.scheme][case.name]
        weight = weights(case.scheme, out_size, in_size, rotating=False)[0]
        x = activations(case, in_size)
        found.append(attempt(lambda case=case, x=x, weight=weight: call(case, x, weight)))  # type: ignore[misc]
    return found


def microseconds(case: Case, x: Tensor, rotating: list[tuple[Tensor, ...]], behind_norm: bool) -> float:
    """Of one call, and of the norm before it."""
    rows = torch.randn(len(x), HIDDEN, device="cuda", dtype=torch.bfloat16)
    scales = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)

    def run(weight: tuple[Tensor, ...]) -> None:
        if behind_norm:
            rms_norm(rows, rows, scales, 1e-5)
        call(case, x, weight)

    for _ in range(2):
        run(rotating[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in rotating:
            run(weight)
    times = []
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(REPLAYS + 1):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(rotating))
    return statistics.median(times[1:])


def label(tile: Tile) -> str:
    if isinstance(tile, str):
        return tile
    name = "gemv" if isinstance(tile, GemvTile) else "dot" if isinstance(tile, DotTile) else "wgmma"
    return f"{name}({', '.join(str(value) for value in tile)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", choices=SHAPES, help="one scheme")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--all", action="store_true", help="print every candidate, not only the best")
    parser.add_argument("--behind-norm", action="store_true", help="a norm before each")
    arguments = parser.parse_args()
    todo = cases(arguments.only, tuple(int(count) for count in arguments.tokens.split(",")))
    began = time.monotonic()
    compiled = list({kernel_of(case): case for case in todo if not isinstance(case.tile, str)}.values())
    with ProcessPoolExecutor(WORKERS, get_context("spawn")) as pool:
        parts = [compiled[i::WORKERS] for i in range(WORKERS)]
        refused = {
            case.tile: reason
            for part, reasons in zip(parts, pool.map(compile_cases, parts), strict=True)
            for case, reason in zip(part, reasons, strict=True)
            if reason
        }
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"compiled {len(compiled)} kernels in {time.monotonic() - began:.1f} s; refused: {refused or 'none'}")
    for scheme, shapes in SHAPES.items():
        for name, (out_size, in_size) in shapes.items():
            mine = [case for case in todo if (case.scheme, case.name) == (scheme, name) and case.tile not in refused]
            if not mine:
                continue
            rotating = weights(scheme, out_size, in_size, rotating=True)
            size = sum(part.nbytes for part in rotating[0])
            print(f"\n{scheme} {name} {out_size}x{in_size}, {size / 1e6:.1f} MB, {len(rotating)} weights")
            for tokens in sorted({case.tokens for case in mine}):
                results = []
                for case in mine:
                    if case.tokens == tokens:
                        x = activations(case, in_size)
                        results.append((microseconds(case, x, rotating, arguments.behind_norm), label(case.tile)))
                results.sort()
                best = results[0][0]
                for us, tile in results:
                    if arguments.all or us <= TIGHT * best or "(" not in tile:
                        flops = 2 * tokens * out_size * in_size / us / 1e6
                        print(f"{tokens:6d} {us:9.2f} us {size / us / 1e6:6.2f} TB/s {flops:7.1f} TFLOP/s  {tile}")
            del rotating
            torch.cuda.empty_cache()
    print(f"\n{time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
