"""Tiles of the experts against each other in one process and one model: milliseconds a decode step.

    PYTHONPATH=. python3 -m benchmarks.expert_tiles nano-bf16-30b 1:8,2,4,6/2,4 64:8,8,3,3,1 64:16,10,3,2 256:24,16,3,1

A kernel alone and the same kernel among a step's others rank tiles differently, and so do two cards: what counts is
measured here, on the same requests while they are decoded, in turns of a third of a second, so that a card that warms
up slows all of them. Medians of three turns repeated within 0.5 % on an H200. Asked for is BATCH:TILE; each batch
begins with the table's own. A tile is one of `hemiola.kernels.rows_mma`: tokens, warps, depth, blocks and waves of a
GroupTile, or, for as few tokens as are taken pair by pair, a RowsTile's numbers / a DownTile's. The last line is a JSON
document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from hemiola.bench import cell
from hemiola.bench.cells import Driver
from hemiola.bench.machine import describe_device, machine_facts
from hemiola.bench.run import BenchOptions, engine_config
from hemiola.bench.start import Started, start
from hemiola.formats.weight import Experts
from hemiola.kernels.experts import ExpertWeights, pairs_per_expert
from hemiola.kernels.rows_mma import (
    DIRECT,
    GROUP_TILES,
    DownTile,
    GroupTile,
    RowsTile,
    group_tile,
    is_direct,
    takes_experts,
)
from hemiola.model.mixers.moe import MoEMixer
from hemiola.ops.device import moe_experts

Tile = GroupTile | tuple[RowsTile, DownTile]


SETTLING = 6  # steps of a turn before it is timed, of which one may capture a graph


def in_turns(
    driver: Driver, names: Sequence[str], take: Callable[[str], None], rounds: int, steps: int
) -> dict[str, list[float]]:
    """Milliseconds a step of what is being decoded, by name, one of each round; every other round goes backwards. take:
    has a name's way taken from now on."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        for name in names if index % 2 == 0 else reversed(names):
            take(name)
            for _ in range(SETTLING):
                driver.engine.step()
            driver.synchronize()
            begin = time.perf_counter()
            for _ in range(steps):
                driver.engine.step()
            driver.synchronize()
            times[name].append(1000 * (time.perf_counter() - begin) / steps)
    return times


def banks_of(started: Started) -> tuple[ExpertWeights, ExpertWeights]:
    """Up and down of a layer, as kernels read them, with the pieces of a shared expert that is joined; all layers' are
    alike."""
    ops = started.engine.model.ops
    assert ops.resident is not None, "an engine on a GPU keeps its weights there"
    mixers = [layer.mixer for layer in started.engine.model.layers]
    mixer = next(mixer for mixer in mixers if isinstance(mixer, MoEMixer))
    return moe_experts.banks(Experts(mixer.up, mixer.down, mixer.together), ops.resident)


def candidate(text: str) -> tuple[int, Tile]:
    """Of BATCH:TILE. Raises: ValueError, TypeError."""

    def numbers(part: str) -> list[int]:
        return [int(number) for number in part.split(",")]

    batch, _, tile = text.partition(":")
    if "/" not in tile:
        return int(batch), GroupTile(*numbers(tile))
    up, down = tile.split("/")
    return int(batch), (RowsTile(*numbers(up)), DownTile(*numbers(down)))


def name_of(tile: Tile) -> str:
    parts = tile if isinstance(tile, tuple) else (tile,)
    return "/".join(",".join(map(str, astuple(part))) for part in parts)


def put(scheme: int, per_expert: float, tile: Tile) -> None:
    """Into its table, for up to so many pairs an expert; or for as few tokens as are taken pair by pair."""
    if isinstance(tile, GroupTile):
        GROUP_TILES[scheme] = ((per_expert, tile), *(entry for entry in GROUP_TILES[scheme] if entry[0] > per_expert))
    else:
        DIRECT[scheme] = (tile,) * len(DIRECT[scheme])


def taken(
    started: Started,
    banks: tuple[ExpertWeights, ExpertWeights],
    tiles: Mapping[str, Tile],
    per_expert: float,
    x: torch.Tensor,
    graphs: dict[str, dict[Any, Any]],
    name: str,
) -> None:
    """From now on the tile of that name is, for inputs like x. graphs: the engine's, by the name of the tile with which
    they were captured."""
    put(banks[0].scheme, per_expert, tiles[name])
    if not takes_experts(x, *banks, len(x), started.config.num_experts_per_tok):
        sys.exit(f"{name} does not fit: its blocks find no room, or {len(x)} tokens are not grouped")
    started.engine.runner._graphs = graphs.setdefault(name, {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a synthetic geometry")
    parser.add_argument("asked", nargs="+", type=candidate, metavar="BATCH:TILE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="of a turn, that are timed")
    options = parser.parse_args()
    turns = {batch: 1 + sum(b == batch for b, _ in options.asked) for batch, _ in options.asked}
    outputs = {batch: 8 + n * options.rounds * (SETTLING + options.steps) for batch, n in turns.items()}
    cells = {batch: cell("decode", str(batch), length) for batch, length in outputs.items()}
    asked = BenchOptions(synthetic=options.model, cells=tuple(cells.values()))
    started = start(None, options.model, engine_config(asked))
    if started.device.type != "cuda":
        sys.exit("this times kernels on a GPU, and there is none")
    banks = up, _ = banks_of(started)
    top_k, scheme = started.config.num_experts_per_tok, up.scheme
    driver = Driver(started.engine, started.synchronize)
    results, tables = [], (GROUP_TILES[scheme], DIRECT[scheme])
    # All are kept to the end: torch takes the graphs' memory apart when none of them is left.
    graphs: dict[int, dict[str, dict[Any, Any]]] = {batch: {} for batch in cells}
    for batch, of_batch in cells.items():
        by_pair, per_expert = is_direct(scheme, batch, top_k + up.num_shared), pairs_per_expert(batch, top_k, up)
        own = DIRECT[scheme][batch - 1] if by_pair else group_tile(scheme, per_expert)
        tiles = {name_of(tile): tile for tile in (own, *(tile for b, tile in options.asked if b == batch))}
        if wrong := [name for name, tile in tiles.items() if isinstance(tile, GroupTile) is by_pair]:
            parser.error(f"{', '.join(wrong)} at batch {batch}: pairs are {'not ' if by_pair else ''}grouped there")
        x = torch.empty(batch, started.config.hidden_size, dtype=torch.bfloat16, device=started.device)
        take = partial(taken, started, banks, tiles, per_expert, x, graphs[batch])
        requests = driver.decoding(driver.prompts(batch, of_batch.prompt_tokens), outputs[batch])
        times = in_turns(driver, list(tiles), take, options.rounds, options.steps)
        driver.withdraw(requests)
        GROUP_TILES[scheme], DIRECT[scheme] = tables
        results.append({"cell": of_batch.name, "ms_per_step": times})
        first = statistics.median(next(iter(times.values())))
        for name, samples in times.items():
            median = statistics.median(samples)
            told = ", ".join(f"{ms:.3f}" for ms in samples)
            print(
                f"batch {batch} {name:14} {median:7.3f} ms a step ({median / first - 1:+.1%}): {told}", file=sys.stderr
            )
    conditions = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(describe_device(started.device)),
    }
    document = {"benchmark": "expert_tiles", "model": options.model, "cells": results, "conditions": conditions}
    print(json.dumps(document))


if __name__ == "__main__":
    main()
