"""Time attention, KV write and argmax at the geometry of Nemotron-3 Nano 30B, with several tilings each.

    python -m benchmarks.kernel_attention [decode] [prefill] [kv_write] [argmax]

CUDA graphs of calls are replayed, each decode with a cache of its own: large ones are not found in the L2 cache, small
ones are. Printed are microseconds a call, and terabytes or teraflops (of the scores that count, half of a square) a
second.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch
from torch import Tensor

from hemiola.kernels.attention_decode import DecodeTiling, attention_decode
from hemiola.kernels.attention_prefill import PrefillTiling, attention_prefill
from hemiola.kernels.kv_write import kv_write
from hemiola.kernels.sample import argmax

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, VOCAB = 32, 2, 128, 16, 131072
KV_TYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
COLD_BYTES = 400e6  # what the calls of a graph read in all, at least; L2 holds 50 MB
MOST_CALLS = 24
WORKERS = 12
MAX_TOKENS = 65536  # the table of a captured step is as wide as the longest request allowed

DECODE = (
    DecodeTiling(64, 1, 2, 4, 3),
    DecodeTiling(64, 2, 2, 4, 3),
    DecodeTiling(64, 4, 2, 4, 3),
    DecodeTiling(64, 2, 1, 4, 4),
    DecodeTiling(64, 2, 4, 4, 3),
    DecodeTiling(64, 2, 3, 4, 2),
    DecodeTiling(32, 4, 4, 4, 3),
    DecodeTiling(128, 1, 1, 4, 3),
    DecodeTiling(128, 1, 2, 4, 2),
    DecodeTiling(128, 1, 1, 8, 3),
    DecodeTiling(128, 1, 2, 8, 2),
)
DECODE_SHAPES = [(rows, length) for rows in (1, 8, 32, 64, 128, 256) for length in (128, 1024, 8192)] + [(1, 32768)]
PREFILL = (
    PrefillTiling(128, 64, 8, 3),
    PrefillTiling(128, 64, 8, 2),
    PrefillTiling(128, 128, 8, 2),
    PrefillTiling(64, 64, 4, 3),
    PrefillTiling(64, 64, 4, 2),
    PrefillTiling(64, 128, 4, 2),
    PrefillTiling(128, 32, 8, 3),
)
PREFILL_SHAPES = [(1, 8192), (16, 1024), (8, 1024), (64, 128)]


class Cache:
    """Keys and values of `rows` requests of `length` tokens, in scattered blocks."""

    def __init__(self, rows: int, length: int, dtype: torch.dtype) -> None:
        columns = -(-length // BLOCK_SIZE)
        shape = (rows * columns, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        self.k, self.v = (torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_().to(dtype) for _ in "kv")
        self.table = torch.zeros(rows, MAX_TOKENS // BLOCK_SIZE, dtype=torch.int32, device="cuda")
        self.table[:, :columns] = torch.randperm(rows * columns, device="cuda").view(rows, columns)
        self.lens = torch.full((rows,), length, dtype=torch.int32, device="cuda")

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


def graph_time(calls: Sequence[Callable[[], object]]) -> float:
    """Median seconds of one call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    while len(times) < 4 or (sum(times) < 4e-3 and len(times) < 12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times[1:])[len(times[1:]) // 2] / len(calls)


def show(name: str, seconds: Sequence[tuple[str, float]], amount: float, unit: str) -> None:
    """amount: terabytes or teraflops of a call."""
    best = min(value for _, value in seconds)
    print(f"{name}: best {best * 1e6:.1f} us, {amount / best:.3g} {unit}/s")
    print("   " + "  ".join(f"[{config}] {value * 1e6:.1f}" for config, value in seconds), flush=True)


def words(tiling: DecodeTiling | PrefillTiling) -> str:
    return ",".join(str(getattr(tiling, field)) for field in tiling.__slots__)


def attend_decode(q: Tensor, cache: Cache, tiling: DecodeTiling, invariant: bool = False) -> Tensor:
    arguments = q, cache.k, cache.v, cache.table, cache.lens, HEAD_DIM**-0.5, 0.5, 2.0
    return attention_decode(*arguments, invariant=invariant, tiling=tiling)


def time_decode() -> None:
    for kind, dtype in KV_TYPES.items():
        for rows, length in DECODE_SHAPES:
            caches = [Cache(rows, length, dtype)]
            count = int(min(MOST_CALLS, max(2, COLD_BYTES // caches[0].nbytes)))
            caches += [Cache(rows, length, dtype) for _ in range(count - 1)]
            q = torch.randn(rows, HEADS, HEAD_DIM, device="cuda").bfloat16()
            seconds = [(words(t), graph_time([partial(attend_decode, q, c, t) for c in caches])) for t in DECODE]
            calls = [partial(attend_decode, q, c, DecodeTiling(), invariant=True) for c in caches]
            show(f"decode {kind} {rows} x {length}", seconds, caches[0].nbytes / 1e12, "TB")
            print(f"   invariant {graph_time(calls) * 1e6:.1f}")
            del caches


def attend_prefill(q: Tensor, cache: Cache, starts: Tensor, length: int, tiling: PrefillTiling) -> Tensor:
    arguments = q, cache.k, cache.v, cache.table, starts, cache.lens, HEAD_DIM**-0.5, 0.5, 2.0
    return attention_prefill(*arguments, length, tiling=tiling)


def time_prefill() -> None:
    for kind, dtype in KV_TYPES.items():
        for rows, length in PREFILL_SHAPES:
            cache = Cache(rows, length, dtype)
            q = torch.randn(rows * length, HEADS, HEAD_DIM, device="cuda").bfloat16()
            starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * length
            flops = rows * 4 * HEADS * HEAD_DIM * length * (length + 1) / 2
            seconds = [
                (words(t), graph_time([partial(attend_prefill, q, cache, starts, length, t)] * 3)) for t in PREFILL
            ]
            show(f"prefill {kind} {rows} x {length}", seconds, flops / 1e12, "TFLOP")


def time_kv_write() -> None:
    for kind, dtype in KV_TYPES.items():
        for tokens in (1, 64, 256, 8192):
            caches = [Cache(1, max(tokens, 16), dtype) for _ in range(MOST_CALLS)]
            k, v = torch.randn(2, tokens, KV_HEADS, HEAD_DIM, device="cuda").bfloat16()
            slots = torch.randperm(max(tokens, 16), device="cuda")[:tokens]
            calls = [partial(kv_write, k, v, c.k, c.v, slots, 0.5, 2.0) for c in caches]
            show(f"kv_write {kind} {tokens}", [("", graph_time(calls))], 2 * k.nbytes / 1e12, "TB read")


def time_argmax() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 8, 64, 256):
            logits = [torch.randn(rows, VOCAB, device="cuda").to(dtype) for _ in range(max(2, min(24, 1000 // rows)))]
            calls = [partial(argmax, x) for x in logits]
            show(f"argmax {dtype} {rows}", [("", graph_time(calls))], logits[0].nbytes / 1e12, "TB")


def compilations() -> Iterator[Callable[[], object]]:
    for dtype in KV_TYPES.values():
        cache = Cache(2, 512, dtype)
        one = Cache(256, 16, dtype)
        for tiling in DECODE:
            for c in (cache, one):  # with and without splits
                q = torch.zeros(len(c.lens), HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
                yield partial(attend_decode, q, c, tiling)
        q = torch.zeros(512, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        starts = torch.tensor([0, 256, 512], dtype=torch.int32, device="cuda")
        for prefill_tiling in PREFILL:
            yield partial(attend_prefill, q, cache, starts, 256, prefill_tiling)


def compile_part(part: int) -> None:
    """In a worker: every WORKERS-th launch leaves its kernels in Triton's cache on disk."""
    for i, call in enumerate(compilations()):
        if i % WORKERS == part:
            call()


PARTS = {"decode": time_decode, "prefill": time_prefill, "kv_write": time_kv_write, "argmax": time_argmax}


def main() -> None:
    start = time.perf_counter()
    with ProcessPoolExecutor(WORKERS, get_context("spawn")) as pool:
        list(pool.map(compile_part, range(WORKERS)))
    print(f"{torch.cuda.get_device_name()}; compiled in {time.perf_counter() - start:.0f} s")
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
