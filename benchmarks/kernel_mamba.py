"""Time the Mamba-2 kernels and the norms at Lightning-30B's sizes, by replays of CUDA graphs.

    python -m benchmarks.kernel_mamba [--rows 1 8 32 64 128 256] [--only NAME]

Every call in a graph has inputs and states of its own, so that the L2 cache serves none of them. Printed are the median
microseconds of a call and the rate of the bytes that have to move, for the table's tiles (marked *) and for others.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

import torch
from torch import Tensor

from hemiola.kernels import causal_conv1d as conv
from hemiola.kernels.gated_rms_norm import gated_rms_norm
from hemiola.kernels.rms_norm import rms_norm
from hemiola.kernels.ssd_scan import Chunks, ScanTiles, ssd_scan
from hemiola.kernels.ssd_update import UpdateTile, ssd_update
from hemiola.ops.layout import PrefillLayout

HIDDEN, HEADS, HEAD_DIM, GROUPS, STATE, WIDTH, CHUNK = 2688, 64, 64, 8, 128, 4, 128
INNER, BC = HEADS * HEAD_DIM, GROUPS * STATE
CHANNELS = INNER + 2 * BC
BF16 = torch.bfloat16
NO_LIMIT = (0.0, math.inf)

UPDATE_TILES = [UpdateTile(p, w) for p, w in ((8, 1), (8, 2), (16, 2), (16, 4), (32, 4), (64, 4), (64, 8))]
CONV_TILES = [(16, 256), (16, 128), (32, 128), (8, 256)]
STATE_TILES = [(64, 4, 2), (32, 4, 3), (64, 8, 3), (128, 8, 2)]
OUTPUT_TILES = [
    (64, 128, 4, 4, 2), (64, 128, 8, 8, 2), (64, 128, 8, 8, 3), (128, 128, 8, 8, 2), (64, 32, 8, 4, 2),
    (32, 128, 8, 4, 2), (64, 64, 1, 4, 2),
]  # fmt: skip
SCAN_TILES = [
    *(ScanTiles(*states, 64, 128, 8, 4, 2) for states in STATE_TILES),
    *(ScanTiles(64, 4, 3, *outputs) for outputs in OUTPUT_TILES),
]


def call_us(calls: Sequence[Callable[[], object]], replays: int = 7) -> float:
    """Median over replays of a graph of `calls`, in microseconds a call."""
    calls[0]()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    times = []
    for _ in range(replays + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    del kept
    return median(times[1:])


def report(name: str, us: float, num_bytes: int) -> None:
    print(f"{name:58s} {us:9.2f} us {num_bytes / us / 1e6:6.2f} TB/s", flush=True)


@dataclass(frozen=True)
class Parameters:
    """Weights of a layer, and the pool of its states."""

    conv_weight: Tensor
    conv_bias: Tensor
    A: Tensor
    D: Tensor
    dt_bias: Tensor
    norm: Tensor
    gated: Tensor
    conv_state: Tensor
    ssm_state: Tensor

    @classmethod
    def random(cls, slots: int) -> Parameters:
        def rand(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
            return torch.randn(*shape, device="cuda").to(dtype)

        vectors = (-torch.rand(HEADS, device="cuda"), *rand(2, HEADS, dtype=torch.float32))
        return cls(
            rand(CHANNELS, WIDTH), rand(CHANNELS), *vectors, rand(HIDDEN), rand(INNER),
            torch.zeros(slots, CHANNELS, WIDTH - 1, dtype=BF16, device="cuda"),
            torch.zeros(slots, HEADS, HEAD_DIM, STATE, device="cuda"),
        )  # fmt: skip


def projected(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """in_proj's output as the mixer splits it: z, xBC, dt."""
    whole = torch.randn(num_tokens, INNER + CHANNELS + HEADS, dtype=BF16, device="cuda")
    z, xBC, dt = whole.split([INNER, CHANNELS, HEADS], -1)
    return z, xBC, dt


def split(convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, B, C = convolved.split([INNER, BC, BC], -1)
    return x.unflatten(1, (HEADS, -1)), B.unflatten(1, (GROUPS, -1)), C.unflatten(1, (GROUPS, -1))


def time_norms(p: Parameters, num_tokens: int) -> None:
    repeats = max(2, min(64, 65536 // num_tokens))
    x = [torch.randn(2, num_tokens, HIDDEN, dtype=BF16, device="cuda") for _ in range(repeats)]
    num_bytes = num_tokens * HIDDEN * 2 * 4
    report(f"rms_norm {num_tokens}", call_us([lambda x=x: rms_norm(x[0], x[1], p.norm, 1e-5) for x in x]), num_bytes)
    us = call_us([lambda x=x: rms_norm(x[0], x[1], p.norm, 1e-5, 0.02) for x in x])
    report(f"rms_norm {num_tokens} e4m3", us, num_bytes * 7 // 8)
    parts = [(projected(num_tokens)[0], torch.randn(num_tokens, INNER, dtype=BF16, device="cuda")) for _ in x[:16]]
    us = call_us([lambda z=z, y=y: gated_rms_norm(y, z, p.gated, INNER // GROUPS, 1e-5, 0.02) for z, y in parts])
    report(f"gated_rms_norm {num_tokens} e4m3", us, num_tokens * INNER * 5)


def time_decode(p: Parameters, num_rows: int) -> None:
    repeats = max(2, min(64, 2048 // num_rows))
    slots = [part.clone() for part in torch.randperm(repeats * num_rows, device="cuda").int().split(num_rows)]
    inputs = [projected(num_rows) for _ in range(min(repeats, 16))] * 4
    calls = list(zip(inputs, slots, strict=False))

    def update_conv(xBC: Tensor, slot: Tensor) -> Tensor:
        return conv.causal_conv1d_update(xBC, p.conv_weight, p.conv_bias, p.conv_state, slot)

    us = call_us([lambda i=i, s=s: update_conv(i[1], s) for i, s in calls])
    report(f"causal_conv1d_update {num_rows}", us, num_rows * CHANNELS * 2 * 2 * WIDTH)

    def update(i: tuple[Tensor, Tensor, Tensor], slot: Tensor, tile: UpdateTile | None) -> Tensor:
        x, B, C = split(i[1])
        return ssd_update(x, i[2], p.A, B, C, p.D, p.dt_bias, p.ssm_state, slot, NO_LIMIT, tile)

    for tile in (None, *UPDATE_TILES):
        us = call_us([lambda i=i, s=s, t=tile: update(i, s, t) for i, s in calls])
        name = "*" if tile is None else f"P {tile.head_rows}, warps {tile.num_warps}"
        report(f"ssd_update {num_rows} {name}", us, 2 * num_rows * INNER * STATE * 4)


def time_prefill(p: Parameters, counts: Sequence[int]) -> None:
    starts, computed = [0, *accumulate(counts)], [0] * len(counts)
    layout = PrefillLayout.build(starts, computed, CHUNK, "cuda")
    chunks = Chunks(
        layout.chunk_rows, layout.chunk_starts, layout.chunk_ends, layout.row_first_chunk, layout.token_rows.shape[0]
    )
    start_loc, num_computed = (torch.tensor(v, dtype=torch.int32, device="cuda") for v in (starts, computed))
    has_initial = num_computed > 0
    inputs = [projected(starts[-1]) for _ in range(3)]
    slots = [part.clone() for part in torch.arange(3 * len(counts), device="cuda").int().split(len(counts))]
    name = f"{len(counts)} x {counts[0]}"
    table = conv._TILE_TOKENS, conv._TILE_CHANNELS
    for tile in (table, *CONV_TILES):
        conv._TILE_TOKENS, conv._TILE_CHANNELS = tile
        us = call_us(
            [
                lambda i=i, s=s: conv.causal_conv1d(
                    i[1], p.conv_weight, p.conv_bias, p.conv_state, s, start_loc, has_initial, layout.token_rows
                )
                for i, s in zip(inputs, slots, strict=True)
            ]
        )
        mark = "*" if tile is table else f"{tile[0]} x {tile[1]}"
        report(f"causal_conv1d {name} {mark}", us, starts[-1] * CHANNELS * 2 * 2)
    conv._TILE_TOKENS, conv._TILE_CHANNELS = table

    def scan(i: tuple[Tensor, Tensor, Tensor], slot: Tensor, tiles: ScanTiles | None) -> Tensor:
        x, B, C = split(i[1])
        return ssd_scan(
            x, i[2], p.A, B, C, p.D, p.dt_bias, p.ssm_state, slot, start_loc, num_computed, CHUNK, NO_LIMIT, chunks,
            tiles,
        )  # fmt: skip

    for tiles in (None, *SCAN_TILES):
        us = call_us([lambda i=i, s=s, t=tiles: scan(i, s, t) for i, s in zip(inputs, slots, strict=True)])
        mark = "*" if tiles is None else " ".join(map(str, tiles))
        report(f"ssd_scan {name} {mark}", us, starts[-1] * (CHANNELS + INNER) * 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--only", choices=("norms", "decode", "prefill"))
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}")
    p = Parameters.random(2048)
    for num_rows in arguments.rows:
        if arguments.only in (None, "norms"):
            time_norms(p, num_rows)
        if arguments.only in (None, "decode"):
            time_decode(p, num_rows)
    if arguments.only in (None, "norms"):
        time_norms(p, 8192)
    if arguments.only in (None, "prefill"):
        for counts in ([8192], [1024] * 16, [512]):
            time_prefill(p, counts)


if __name__ == "__main__":
    main()
