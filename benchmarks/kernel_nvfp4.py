# ruff: noqa: B023  (what is bound in a loop is called before its next round)
"""Time the CUDA kernels for few tokens and NVFP4 weights at the geometry of Nemotron-3 Nano 30B, tile against tile.

    python -m benchmarks.kernel_nvfp4 [--tokens 1,64]

As in kernel_experts and kernel_linear: graphs of calls over weights that do not fit the L2 cache. What each candidate's
result differs from the Triton kernels' is printed beside its time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernel_experts import HIDDEN, INTER, NUM_EXPERTS, TOP_K, bank, graph_time, routing
from hemiola.kernels import experts as triton_experts
from hemiola.kernels import linear_nvfp4, nvfp4, rows_mma
from hemiola.kernels.align import empty_rows
from hemiola.kernels.experts import NVFP4, ExpertWeights
from hemiola.kernels.rows_mma import DownTile, GroupTile, RowsTile

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
Call = Callable[[Tensor, Tensor, Tensor, ExpertWeights, ExpertWeights], Tensor]


def direct(tile: RowsTile, down: DownTile) -> Call:
    def call(x: Tensor, ids: Tensor, w: Tensor, up: ExpertWeights, dn: ExpertWeights) -> Tensor:
        hidden = torch.empty(ids.numel(), INTER, dtype=x.dtype, device=x.device)
        rows_mma.project(x, TOP_K, up, TOP_K, ids, hidden, tile)
        return rows_mma.down(hidden, dn, ids, w, x, 2.5, HIDDEN, down)

    return call


def grouped_rows(ids: Tensor, tile: GroupTile, x: Tensor) -> tuple[triton_experts.Groups, Tensor]:
    groups, rows = triton_experts.empty_groups(ids, NUM_EXPERTS, tile.tokens), empty_rows(x)
    triton_experts.fill_groups(groups, ids, NUM_EXPERTS, tile.tokens, 0, x, rows)
    return groups, rows


def grouped(tile: GroupTile) -> Call:
    def call(x: Tensor, ids: Tensor, w: Tensor, up: ExpertWeights, dn: ExpertWeights) -> Tensor:
        groups, rows = grouped_rows(ids, tile, x)
        hidden = torch.empty(ids.numel(), INTER, dtype=x.dtype, device=x.device)
        rows_mma.project_groups(rows, TOP_K, up, TOP_K, *groups, hidden, tile, x_in_place=True)
        parts = torch.empty(ids.numel(), HIDDEN, dtype=x.dtype, device=x.device)
        rows_mma.project_groups(hidden, 1, dn, TOP_K, *groups, parts, tile, pair_weights=w)
        return triton_experts.combine(parts, None, TOP_K, 2.5, x)

    return call


def candidates(num_tokens: int) -> Iterator[tuple[str, Call]]:
    yield "triton", lambda x, ids, w, up, dn: triton_experts.experts(x, ids, w, up, dn, 2.5, x)
    if num_tokens <= 8:
        for (rows, splits, depth), (ks, kd) in (
            ((1, 4, 2), (1, 4)), ((2, 4, 4), (1, 6)), ((2, 4, 2), (2, 2)), ((1, 8, 2), (2, 4)), ((2, 2, 4), (1, 2)),
            ((4, 2, 2), (3, 2)), ((4, 4, 2), (2, 2)), ((2, 8, 2), (4, 2)),
        ):  # fmt: skip
            tile, down = RowsTile(8, rows, splits, depth), DownTile(ks, kd)
            yield f"direct {rows} {splits} {depth} / {ks} {kd}", direct(tile, down)
    if num_tokens >= 8:
        for shape in ((8, 8, 3, 2), (8, 16, 3, 1), (16, 8, 3, 2), (16, 16, 3, 1), (24, 12, 3, 1), (24, 16, 3, 1)):
            if shape[0] == 8 or num_tokens >= 64:
                yield f"grouped {shape}", grouped(GroupTile(*shape))


def time_experts(tokens: list[int]) -> None:
    banks = [(bank(NVFP4, INTER, HIDDEN), bank(NVFP4, HIDDEN, INTER)) for _ in range(2)]
    expert_bytes = sum(t.nbytes for b in banks[0] for t in (b.codes, b.block_scales) if t is not None) / NUM_EXPERTS
    for num_tokens in tokens:
        x = torch.randn(num_tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        routings = [routing(num_tokens) for _ in range(8)]
        taken = sum(len(ids.unique()) for ids, _ in routings) / 8
        print(f"experts, T = {num_tokens}: {taken:.1f} experts, {taken * expert_bytes / 1e6:.0f} MB", flush=True)
        if num_tokens >= 8:
            time_parts(x, routings, banks, rows_mma.group_tile(NVFP4, num_tokens * TOP_K / NUM_EXPERTS))
        time_calls(
            candidates(num_tokens),
            lambda call: call(x, *routings[0], *banks[0]),
            lambda call: [partial(call, x, *r, *banks[i % 2]) for i, r in enumerate(routings)],
            taken * expert_bytes,
        )


def time_parts(x, routings, banks, tile) -> None:  # type: ignore[no-untyped-def]
    hidden = torch.randn(routings[0][0].numel(), INTER, dtype=x.dtype, device=x.device)
    parts = torch.empty(len(hidden), HIDDEN, dtype=x.dtype, device=x.device)
    times: dict[str, list[Callable[[], object]]] = {"up": [], "down": []}
    for i, (ids, w) in enumerate(routings):
        up, dn = banks[i % 2]
        groups, rows = grouped_rows(ids, tile, x)
        up_call = partial(rows_mma.project_groups, rows, TOP_K, up, TOP_K, *groups, hidden.clone(), tile)
        times["up"].append(partial(up_call, x_in_place=True))
        down_call = partial(rows_mma.project_groups, hidden, 1, dn, TOP_K, *groups, parts, tile)
        times["down"].append(partial(down_call, pair_weights=w))
    print(f"    {tile}: " + ", ".join(f"{name} {graph_time(calls) * 1e6:.1f} us" for name, calls in times.items()))


def time_linears(tokens: list[int]) -> None:
    for name, (rows, columns) in {
        "shared up": (3712, 2688), "shared down": (2688, 3712), "lm_head": (131072, 2688),
    }.items():  # fmt: skip
        num_weights = 1 if rows > 100_000 else 24
        data = torch.randint(0, 256, (num_weights, rows, columns // 2), device="cuda", dtype=torch.uint8)
        block = (torch.rand(num_weights, rows, columns // 16, device="cuda") * 50 + 4).to(torch.float8_e4m3fn)
        codes, scales = zip(*(nvfp4.packed(d, b) for d, b in zip(data, block, strict=True)), strict=True)
        num_bytes = codes[0].nbytes + scales[0].nbytes
        for num_tokens in tokens:
            if num_tokens > 32:
                continue
            x = torch.randn(num_tokens, columns, device="cuda", dtype=torch.bfloat16)
            relu = name == "shared up"
            calls: list[tuple[str, Callable[[Tensor, Tensor], Tensor]]] = [
                ("triton", lambda c, s: linear_nvfp4.linear_nvfp4(x, c, s, rows, 1e-4, relu))
            ]
            for wr, wk, depth in (
                (1, 4, 4),
                (1, 8, 2),
                (2, 4, 4),
                (2, 4, 2),
                (1, 6, 2),
                (2, 8, 2),
                (8, 1, 2),
                (4, 2, 2),
            ):
                tile = RowsTile(-(-num_tokens // 8) * 8, wr, wk, depth)
                calls.append(
                    (
                        f"mma {wr} {wk} {depth}",
                        lambda c, s, tile=tile: rows_mma.linear(
                            x,
                            c,
                            s,
                            rows,
                            1e-4 * nvfp4.REMAINDER,
                            relu,
                            None,
                            tile,
                        ),
                    )
                )
            print(f"{name}, T = {num_tokens}: {num_bytes / 1e6:.1f} MB", flush=True)
            time_calls(
                iter(calls),
                lambda call: call(codes[0], scales[0]),
                lambda call: [partial(call, c, s) for c, s in zip(codes, scales, strict=True)],
                num_bytes,
            )


def time_calls(calls, once, many, num_bytes) -> None:  # type: ignore[no-untyped-def]
    """Print every candidate's time, the best last in mind."""
    first = None
    for label, call in calls:
        try:
            result = once(call).float()
            torch.cuda.synchronize()
            first = result if first is None else first
            difference = ((result - first).norm() / first.norm()).item()
            seconds = graph_time(many(call))
        except Exception as problem:  # noqa: BLE001 - one candidate that does not fit must not end the run
            print(f"    {label:26} {type(problem).__name__}: {str(problem)[:150]}")
            continue
        print(
            f"    {label:26} {seconds * 1e6:8.1f} us  {num_bytes / seconds / 1e12:5.2f} TB/s  differs {difference:.1e}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    tokens = [int(n) for n in parser.parse_args().tokens.split(",")]
    start = time.perf_counter()
    torch.manual_seed(0)
    time_linears(tokens)
    time_experts(tokens)
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
