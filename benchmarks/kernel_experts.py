"""Time the routed experts' kernels of one layer at the geometry of Nemotron-3 Nano 30B, with several tiles each.

    python -m benchmarks.kernel_experts [nvfp4] [fp8] [bf16] [--quick]

A graph of calls with random routings over two banks is replayed, so that no call finds its weights in the L2 cache.
Printed are microseconds a call, terabytes of weights a second (each expert that is taken counts once) and
teraflops a second, and how far each candidate's result lies from the first one's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch
from torch import Tensor

from hemiola.kernels import experts as kernels
from hemiola.kernels.experts import BF16, FP8, NVFP4, ExpertWeights, GroupTiles, RowTiles
from hemiola.kernels.nvfp4 import words_per_row
from hemiola.kernels.router import moe_route, route, router_logits

NUM_EXPERTS, TOP_K, HIDDEN, INTER = 128, 6, 2688, 1856
SCHEMES = {"nvfp4": NVFP4, "fp8": FP8, "bf16": BF16}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 2048, 8192)
WORKERS = 12
Call = Callable[[Tensor, Tensor, Tensor, ExpertWeights, ExpertWeights], Tensor]

# Candidates: name, and from how many to how many tokens. A tile serves up and down.
ROWS = {
    NVFP4: ((16, 128, 4, 3), (16, 128, 4, 1), (8, 128, 2, 3), (8, 128, 4, 3), (32, 128, 4, 3)),
    FP8: ((16, 256, 4, 3), (8, 256, 2, 3), (8, 512, 4, 3), (8, 512, 4, 1), (4, 1024, 4, 3)),
    BF16: ((16, 256, 4, 3), (8, 256, 2, 3), (8, 256, 4, 3), (8, 256, 4, 1), (4, 512, 4, 3)),
}
SINGLE = {
    NVFP4: (
        (16, 8, 32, 1, 4),
        (16, 8, 32, 1, 6),
        (16, 8, 64, 1, 4),
        (32, 8, 32, 2, 5),
        (64, 8, 32, 4, 4),
        (64, 8, 64, 4, 4),
    ),
    FP8: ((64, 16, 128, 4, 4), (64, 16, 256, 4, 4)),
    BF16: ((64, 16, 64, 4, 4), (64, 16, 128, 4, 4)),
}
NARROW = {
    NVFP4: (
        (64, 16, 16, 4, 4), (64, 16, 32, 4, 3), (64, 16, 32, 4, 4), (64, 16, 64, 4, 3), (128, 16, 32, 8, 3),
        (128, 16, 32, 4, 3), (32, 16, 32, 2, 4), (64, 8, 32, 4, 4), (64, 32, 32, 4, 3), (128, 32, 32, 8, 3),
    ),
    FP8: ((64, 16, 128, 4, 4), (64, 16, 256, 4, 3), (128, 16, 128, 4, 4), (128, 16, 128, 8, 4), (64, 32, 128, 4, 4)),
    BF16: ((64, 16, 64, 4, 4), (64, 16, 128, 4, 4), (128, 16, 64, 8, 4), (128, 16, 128, 8, 3), (64, 32, 64, 4, 4)),
}  # fmt: skip
WIDE = {
    NVFP4: (
        (64, 64, 32, 4, 3), (128, 64, 16, 8, 3), (128, 64, 32, 8, 3), (128, 128, 16, 8, 3), (128, 128, 16, 8, 2),
        (128, 128, 32, 8, 2), (64, 128, 16, 4, 3), (128, 256, 16, 8, 2),
    ),
    FP8: ((128, 64, 128, 4, 3), (128, 64, 128, 8, 3), (128, 128, 128, 8, 3), (128, 128, 64, 8, 4)),
    BF16: ((128, 64, 64, 8, 3), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 3), (128, 256, 64, 8, 3)),
}  # fmt: skip


def candidates(scheme: int) -> Iterator[tuple[str, Call, int, int]]:
    """Name, call, and the least and the most tokens to time it for."""

    def by_row(tiles: RowTiles) -> Call:
        return lambda x, ids, w, up, down: kernels.experts_by_row(x, ids, w, up, down, 2.5, x, tiles, tiles)

    def by_group(tiles: GroupTiles, single: bool) -> Call:
        return lambda x, ids, w, up, down: kernels.experts_by_group(
            x, ids, w, up, down, 2.5, x, tiles, tiles, single=single
        )

    for shape in ROWS[scheme]:
        yield f"rows {shape}", by_row(RowTiles(*shape)), 1, 4
    for shape in SINGLE[scheme]:
        yield f"single {shape}", by_group(GroupTiles(*shape), True), 1, 8
    for shape in NARROW[scheme]:
        yield f"groups {shape}", by_group(GroupTiles(*shape), False), 8, 256
    for shape in WIDE[scheme]:
        yield f"groups {shape}", by_group(GroupTiles(*shape), False), 256, 8192
    yield "default", lambda x, ids, w, up, down: kernels.experts(x, ids, w, up, down, 2.5, x), 1, 8192


def bank(scheme: int, out_size: int, in_size: int) -> ExpertWeights:
    """Random codes; scales such that a product's values are of the size of its inputs. Sizes fill tiles."""
    shape = (NUM_EXPERTS, out_size, in_size)
    gain = 0.6 * in_size**-0.5
    if scheme == BF16:
        return ExpertWeights(torch.randn(shape, device="cuda", dtype=torch.bfloat16) * (gain / 0.6), None, None, None)
    if scheme == FP8:
        codes = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 60).to(torch.float8_e4m3fn)
        inner = torch.full((NUM_EXPERTS,), 0.02, device="cuda")
        return ExpertWeights(codes, None, inner * (in_size**-0.5 / 60), inner)
    size = words_per_row(in_size)

    def integers(*size: int) -> Tensor:
        return torch.randint(-(1 << 31), 1 << 31, size, device="cuda", dtype=torch.int64).to(torch.int32)

    # Bytes of scales between 0x90 and 0x9F: scales of 1/16 to 1/4.
    scales = (integers(NUM_EXPERTS, out_size, size // 8) & ~0x0F0F0F0F) | 0x09090909
    factor = torch.full((NUM_EXPERTS,), 128 * gain * 2, device="cuda")
    return ExpertWeights(integers(NUM_EXPERTS, out_size, size), scales, factor, None)


def routing(num_tokens: int) -> tuple[Tensor, Tensor]:
    ids = torch.rand(num_tokens, NUM_EXPERTS, device="cuda").argsort(1)[:, :TOP_K].int().contiguous()
    return ids, torch.rand(num_tokens, TOP_K, device="cuda") / TOP_K + 0.05


def graph_time(calls: list[Callable[[], object]], least_s: float = 0.006) -> float:
    """Median seconds of one call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    while len(times) < 4 or (sum(times) < least_s and len(times) < 40):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times[1:])[len(times[1:]) // 2] / len(calls)


def compile_candidates(scheme: int, first: int, step: int) -> None:
    """In a worker: launch every step-th candidate once, which leaves its kernels in Triton's cache."""
    banks = bank(scheme, INTER, HIDDEN), bank(scheme, HIDDEN, INTER)
    for _, call, least, _ in list(candidates(scheme))[first::step]:
        x = torch.randn(least, HIDDEN, device="cuda", dtype=torch.bfloat16)
        try:
            call(x, *routing(least), *banks)
        except Exception as problem:  # noqa: BLE001 - told again, with the candidate's name, when it is timed
            print("compile:", type(problem).__name__, str(problem)[:200])


def time_scheme(name: str, quick: bool) -> None:
    scheme = SCHEMES[name]
    banks = [(bank(scheme, INTER, HIDDEN), bank(scheme, HIDDEN, INTER)) for _ in range(2)]
    up, down = banks[0]
    expert_bytes = sum(t.nbytes for b in (up, down) for t in (b.codes, b.block_scales) if t is not None) / NUM_EXPERTS
    print(f"\n{name}: {expert_bytes / 1e6:.3f} MB an expert")
    for num_tokens in TOKENS:
        if quick and num_tokens not in (1, 8, 64, 256, 8192):
            continue
        num_calls = 8 if num_tokens <= 256 else 2
        x = torch.randn(num_tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        routings = [routing(num_tokens) for _ in range(num_calls)]
        taken = sum(len(ids.unique()) for ids, _ in routings) / num_calls
        flops = 4 * num_tokens * TOP_K * HIDDEN * INTER
        print(f"T = {num_tokens}: {taken:.1f} experts, {taken * expert_bytes / 1e6:.0f} MB", flush=True)
        first = None
        for label, call, least, most in candidates(scheme):
            if not least <= num_tokens <= most:
                continue
            try:
                result = call(x, *routings[0], *banks[0]).float()
                first = result if first is None else first
                difference = ((result - first).norm() / first.norm()).item()
                seconds = graph_time([partial(call, x, *r, *banks[i % 2]) for i, r in enumerate(routings)])
            except Exception as problem:  # noqa: BLE001 - one candidate that does not fit must not end the run
                print(f"    {label:34} {type(problem).__name__}: {str(problem)[:120]}")
                continue
            print(
                f"    {label:34} {seconds * 1e6:8.1f} us  {taken * expert_bytes / seconds / 1e12:5.2f} TB/s "
                f"{flops / seconds / 1e12:6.1f} TFLOP/s  differs {difference:.1e}",
                flush=True,
            )
        time_parts(x, routings, banks, scheme)


def time_parts(
    x: Tensor, routings: list[tuple[Tensor, Tensor]], banks: list[tuple[ExpertWeights, ExpertWeights]], scheme: int
) -> None:
    """The grouped way's launches, each alone, with the default tiles."""
    num_pairs = len(x) * TOP_K
    tiles = kernels.group_tiles(banks[0][0], num_pairs / NUM_EXPERTS)
    hidden_type = torch.float8_e4m3fn if scheme == FP8 else torch.bfloat16
    hidden = torch.zeros(num_pairs, INTER, device="cuda", dtype=torch.bfloat16).to(hidden_type)
    parts = torch.empty(num_pairs, HIDDEN, device="cuda", dtype=torch.bfloat16)
    launches: dict[str, list[Callable[[], object]]] = {name: [] for name in ("align", "up", "down", "combine")}
    for i, (ids, weights) in enumerate(routings):
        up, down = banks[i % 2]
        inputs, pairs_per_x = x, TOP_K
        if scheme == FP8:
            launches.setdefault("quantise", []).append(partial(kernels.quantise_pairs, x, ids, up))
            inputs = kernels.quantise_pairs(x, ids, up)
            pairs_per_x = ids.numel() // len(inputs)
        groups = kernels.align(ids, NUM_EXPERTS, tiles.pairs)
        launches["align"].append(partial(kernels.align, ids, NUM_EXPERTS, tiles.pairs))
        launches["up"].append(
            partial(
                kernels.grouped, inputs, pairs_per_x, up, ids, groups, tiles, hidden, next_input_scale=down.input_scale
            )
        )
        launches["down"].append(
            partial(kernels.grouped, hidden, 1, down, ids, groups, tiles, parts, pair_weights=weights)
        )
        launches["combine"].append(partial(kernels.combine, parts, None, TOP_K, 2.5, x))
    times = ", ".join(f"{name} {graph_time(calls) * 1e6:.1f}" for name, calls in launches.items())
    print(f"    parts of {tiles}: {times} us", flush=True)


def time_router() -> None:
    gates = [torch.randn(NUM_EXPERTS, HIDDEN, device="cuda").bfloat16() for _ in range(8)]
    bias = torch.rand(NUM_EXPERTS, device="cuda")
    print("\nrouter")
    for num_tokens in (1, 8, 9, 64, 256, 8192):
        x = torch.randn(num_tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        logits = router_logits(x, gates[0])
        first = graph_time([partial(router_logits, x, gate) for gate in gates])
        second = graph_time([partial(moe_route, logits, bias, TOP_K, 1, 1, True)] * 8)
        both = graph_time([partial(route, x, gate, bias, TOP_K, 1, 1, True) for gate in gates])
        times = f"logits {first * 1e6:.2f} us, choice {second * 1e6:.2f} us, as a layer calls them {both * 1e6:.2f} us"
        print(f"    T = {num_tokens}: {times}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schemes", nargs="*", default=list(SCHEMES))
    parser.add_argument("--quick", action="store_true", help="fewer numbers of tokens")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this times kernels on a GPU, and there is none")
    start = time.perf_counter()
    with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(compile_candidates, SCHEMES[s], i, 6) for s in arguments.schemes for i in range(6)]
        for job in jobs:
            job.result()
    print(f"compiled in {time.perf_counter() - start:.0f} s")
    torch.manual_seed(0)
    time_router()
    for scheme in arguments.schemes:
        time_scheme(scheme, arguments.quick)
    print(f"\n{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
