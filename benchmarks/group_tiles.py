"""Tiles of the grouped experts against each other in one process and one model: milliseconds a decode step.

    PYTHONPATH=. python3 -m benchmarks.group_tiles nano-bf16-30b --batch 64 --tile 8,8,3,3,6 --tile 16,10,3,2

A kernel alone and the same kernel among a step's others rank tiles differently, and so do two cards: what counts is
measured here, in turns, so that a card that warms up slows all of them. A tile is tokens, warps, depth, blocks and
waves of `hemiola.kernels.rows_mma.GroupTile`; the table's own comes first. The last line is a JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple
from datetime import UTC, datetime
from math import inf

import torch

from hemiola.bench import cell
from hemiola.bench.cells import Cell, Driver, measure
from hemiola.bench.machine import describe_device, machine_facts
from hemiola.bench.run import BenchOptions, engine_config
from hemiola.bench.start import Started, start
from hemiola.formats.weight import Experts
from hemiola.kernels.experts import ExpertWeights, pairs_per_expert
from hemiola.kernels.rows_mma import GROUP_TILES, GroupTile, group_tile, takes_experts
from hemiola.model.mixers.moe import MoEMixer
from hemiola.ops.device.moe_experts import banks


def in_turns(
    driver: Driver, asked: Cell, names: Sequence[str], take: Callable[[str], None], rounds: int
) -> dict[str, list[float]]:
    """Milliseconds a step by name, one of each round; every other round goes backwards. take: has a name's way taken
    from now on."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        for name in names if index % 2 == 0 else reversed(names):
            take(name)
            times[name].append(measure(driver, asked, 1)["ms_per_step"])
    return times


def banks_of(started: Started) -> tuple[ExpertWeights, ExpertWeights]:
    """Up and down of a layer, as kernels read them, without pieces of the shared expert; all layers' are alike."""
    ops = started.engine.model.ops
    assert ops.resident is not None, "an engine on a GPU keeps its weights there"
    mixers = [layer.mixer for layer in started.engine.model.layers]
    mixer = next(mixer for mixer in mixers if isinstance(mixer, MoEMixer))
    return banks(Experts(mixer.up, mixer.down, mixer.together), ops.resident)


def tile_of(text: str) -> GroupTile:
    return GroupTile(*map(int, text.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a synthetic geometry")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument(
        "--tile", action="append", type=tile_of, required=True, metavar="TOKENS,WARPS,DEPTH,BLOCKS[,WAVES]"
    )
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    asked = cell("decode", str(options.batch))
    started = start(None, options.model, engine_config(BenchOptions(synthetic=options.model, cells=(asked,))))
    if started.device.type != "cuda":
        sys.exit("this times kernels on a GPU, and there is none")
    up, down = banks_of(started)
    own = group_tile(up.scheme, pairs_per_expert(options.batch, started.config.num_experts_per_tok, up))
    tiles = {",".join(map(str, astuple(tile))): tile for tile in (own, *options.tile)}
    x = torch.empty(options.batch, started.config.hidden_size, dtype=torch.bfloat16, device=started.device)

    def take(name: str) -> None:
        GROUP_TILES[up.scheme] = ((inf, tiles[name]),)
        if not takes_experts(x, up, down, options.batch, started.config.num_experts_per_tok):
            sys.exit(f"{name} does not fit: its blocks find no room, or {options.batch} tokens are not grouped")
        started.engine.runner._graphs.clear()  # they replay the tile that they were captured with

    times = in_turns(Driver(started.engine, started.synchronize), asked, list(tiles), take, options.rounds)
    first = statistics.median(next(iter(times.values())))
    for name, samples in times.items():
        median = statistics.median(samples)
        told = ", ".join(f"{ms:.3f}" for ms in samples)
        print(f"{name:16} {median:7.3f} ms a step ({median / first - 1:+.1%}): {told}", file=sys.stderr)
    conditions = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(describe_device(started.device)),
    }
    print(
        json.dumps(
            {
                "benchmark": "group_tiles",
                "model": options.model,
                "cell": asked.name,
                "ms_per_step": times,
                "conditions": conditions,
            }
        )
    )


if __name__ == "__main__":
    main()
