"""One benchmark run: start, cells, what the GPU did meanwhile, and the document that holds it all."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch

from hemiola.bench.cells import SEED, STANDARD_CELLS, Cell, Driver, measure
from hemiola.bench.machine import (
    COPY_BYTES,
    copy_bandwidth,
    describe_device,
    gpu_address,
    read_bandwidth,
    versions,
)
from hemiola.bench.profile import as_rows, profile
from hemiola.bench.start import Started, start
from hemiola.bench.trace import trace
from hemiola.bench.traffic import Traffic, decode_traffic, distinct_experts
from hemiola.bench.window import WindowError
from hemiola.config.engine import EngineConfig
from hemiola.config.model import LayerKind
from hemiola.evidence.facts import engine_facts, model_facts, path_facts
from hemiola.evidence.identity import checkpoint_digest
from hemiola.inspect import kv_bytes_per_token, state_bytes_per_request
from hemiola.loading import open_manifest
from hemiola.synthetic import geometry

WINDOW_S = 2.0  # of decode steps that an observer watches, about
WINDOW_STEPS = 1024  # at most
TRACE_STEPS = 16
ROUTED_TOKENS = 64


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """model: a checkpoint, None for the shipped one; synthetic wins where it is given. settings: more fields of
    EngineConfig. profile: where the time of each decode cell goes. digest: say which checkpoint it is."""

    model: str | None = None
    synthetic: str | None = None
    cells: tuple[Cell, ...] = STANDARD_CELLS
    repeats: int = 3
    profile: bool = False
    digest: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


def command_of(options: BenchOptions) -> list[str]:
    """Starts a process that runs them now and tells an observer: see `hemiola.bench.__main__`."""
    values = {**asdict(options), "spawned_s": time.monotonic()}
    return [sys.executable, "-m", "hemiola.bench", json.dumps(values)]


Emit = Callable[[Mapping[str, Any]], None]


def run_bench(
    options: BenchOptions,
    imports_s: float | None = None,
    emit: Emit = lambda event: None,
    settle: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The document of one run. imports_s: what the process needed before. emit: takes the events that an observer
    reads, and comes back at once. settle: called when all is loaded, before anything is measured.

    Raises: ConfigError, CheckpointError, CapacityError, UnsupportedPath.
    """
    begin = time.perf_counter()
    emit({"event": "next", "what": "start"})
    config = engine_config(options)
    with _phase("load", emit):
        started = start(options.model, options.synthetic, config)
        driver = Driver(started.engine, started.synchronize)
        first_s = driver.run(driver.prompts(1, min(cell.prompt_tokens for cell in options.cells)), 2).seconds
    settle()
    emit({"event": "gpu", "address": gpu_address(started.device)})
    phases = {**({} if imports_s is None else {"imports": imports_s}), **started.phases, "first_tokens": first_s}
    on_gpu = started.device.type == "cuda"
    emit({"event": "next", "what": "memory bandwidth"})
    copies, reads = (
        measured(started.device, COPY_BYTES if on_gpu else 1 << 26) for measured in (copy_bandwidth, read_bandwidth)
    )
    cells = []
    windows = 0
    for cell in options.cells:
        emit({"event": "next", "what": cell.name})
        try:
            row = measure(driver, cell, options.repeats)
        except WindowError as error:
            cells.append({"cell": cell.name, "kind": cell.kind, "refused": str(error)})
            continue
        if cell.kind == "decode":
            row |= _roofline(started, cell, row["ms_per_step"], copies["bytes_per_s"])
            if on_gpu:
                row["window"] = {"number": windows} | _decode_window(driver, cell, row["ms_per_step"], emit)
                windows += 1
                if options.profile:
                    row["trace"] = _trace(driver, cell)
                    if row["trace"]["busy"] is not None:
                        traffic = _traffic(started, cell)
                        row["profile"] = as_rows(profile(row["trace"], traffic, copies["bytes_per_s"]))
        cells.append(row)
    name = started.name if started.is_synthetic or options.model is None else options.model
    return {
        "benchmark": "bench",
        "model": model_facts(name, started.manifest, started.config, _digest(started, options)),
        "synthetic": started.is_synthetic,
        "engine": engine_facts(started.engine, started.manifest),
        "paths": paths(started),
        "routing": routing(driver),
        "start_s": {**phases, "together": sum(phases.values())},
        "memory": _memory(started),
        "copy": copies,
        "read": reads,
        "cells": cells,
        "conditions": {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": describe_device(started.device),
            "versions": versions(),
            "repeats": options.repeats,
            "seed": SEED,
            "method": "decode: difference of two runs that differ in output length, median; prefill: arrival to first "
            "id, median; greedy, past the end of text, prompts of random ids, no prefix is reused",
            "notes": list(started.engine.notes),
            "seconds": time.perf_counter() - begin,
        },
    }


@contextmanager
def _phase(name: str, emit: Emit) -> Iterator[None]:
    emit({"event": "begin", "phase": name, "at_s": time.monotonic()})
    yield
    emit({"event": "end", "phase": name, "at_s": time.monotonic()})


def _digest(started: Started, options: BenchOptions) -> str | None:
    """Of a checkpoint; None for weights that are drawn, and where no gate is looked for: it reads everything."""
    return checkpoint_digest(started.manifest.checkpoint) if options.digest and not started.is_synthetic else None


def engine_config(options: BenchOptions) -> EngineConfig:
    """Settings for the largest cell: all of a cell's requests run at once, and no prompt is found in a cache."""
    model = geometry(options.synthetic).config if options.synthetic else open_manifest(options.model)[1]
    batch = max(cell.batch for cell in options.cells)
    block = EngineConfig().block_size
    longest = max(max(cell.max_tokens, _window_tokens(cell)) for cell in options.cells) + 1
    longest = min(longest, model.max_position_embeddings)
    tokens = max(
        cell.batch * (min(max(cell.max_tokens, _window_tokens(cell)), longest) + block) for cell in options.cells
    )
    states = batch * state_bytes_per_request(model)
    caches = states + tokens * kv_bytes_per_token(model, 4) + (1 << 20)
    chosen = {
        "max_num_seqs": batch,
        "max_model_len": longest,
        "max_num_batched_tokens": min(16384, max(cell.batch * cell.prompt_tokens for cell in options.cells) + batch),
        "cache_bytes": max(caches, 2 * states),  # states take half of the budget at most
        "prefix_caching": False,
        "snapshot_bytes": 0,
        "swap_bytes": 0,
        "kv_cache_dtype": "model",
    }
    return EngineConfig(**{**chosen, **options.settings})


def _window_tokens(cell: Cell) -> int:
    """Room for the window that NVML watches; after long prompts it is as long as the measurement."""
    return (
        cell.prompt_tokens + WINDOW_STEPS if cell.kind == "decode" and cell.prompt_tokens <= 1024 else cell.max_tokens
    )


def paths(started: Started) -> dict[str, Any]:
    """Which variant each op took so far, and what the reference arm did of it."""
    counts = started.engine.model.ops.snapshot()
    on_reference = sum(calls for path, calls in counts.items() if path.arm == "reference")
    verdict = f"{on_reference} of {sum(counts.values())} calls ran on the reference arm: this measures no device arm"
    return {
        "reference_calls": on_reference,
        "verdict": verdict if on_reference else "no call ran on the reference arm",
        "calls": path_facts(counts.items()),
    }


def routing(driver: Driver, num_tokens: int = ROUTED_TOKENS) -> dict[str, Any] | None:
    """How a prompt's tokens spread over the experts of each layer; None for a model without experts."""
    model, ops = driver.engine.model, driver.engine.model.ops
    if not model.config.num_experts:
        return None
    op = "moe_route"
    route, chosen = getattr(ops, op), []

    def recording(*args: Any, **kwargs: Any) -> Any:
        ids, weights, logits = route(*args, **kwargs)
        chosen.append(ids.flatten())
        return ids, weights, logits

    setattr(ops, op, recording)
    try:
        driver.run(driver.prompts(1, num_tokens), 1)
    finally:
        setattr(ops, op, route)
    layers = chosen[: model.config.count(LayerKind.MOE)]
    counts = [torch.bincount(ids.cpu().long(), minlength=model.config.num_experts) for ids in layers]
    return {
        "tokens": num_tokens,
        "distinct_experts": [int((count > 0).sum()) for count in counts],
        "distinct_experts_expected": distinct_experts(model.config, num_tokens),
        "largest_share": max(float(count.max() / count.sum()) for count in counts),
    }


def _traffic(started: Started, cell: Cell) -> Traffic:
    """Of a step in the middle of a cell's output."""
    config, plan = started.config, started.engine.plan
    context = cell.prompt_tokens + cell.max_output // 2
    kv_bytes = plan.block_bytes // plan.block_size
    return decode_traffic(started.manifest, config, cell.batch, context, plan.slot_bytes, kv_bytes)


def _roofline(started: Started, cell: Cell, ms_per_step: float, bytes_per_s: float) -> dict[str, Any]:
    config, traffic = started.config, _traffic(started, cell)
    rate = traffic.total / (ms_per_step / 1000)
    return {
        "bytes_per_step": traffic.as_dict(),
        "distinct_experts_expected": distinct_experts(config, cell.batch),
        "bytes_per_s": rate,
        "fraction_of_copy": rate / bytes_per_s,
        "floor_ms": 1000 * traffic.total / bytes_per_s,
    }


def _decode_window(driver: Driver, cell: Cell, ms_per_step: float, emit: Emit) -> dict[str, Any]:
    """Nothing but decode steps for about WINDOW_S, for the observer, after the prompts' prefill."""
    lead = _lead(driver, cell)
    room = _window_tokens(cell) - cell.prompt_tokens - 4 - lead
    steps = max(1, min(int(1000 * WINDOW_S / ms_per_step), room))
    with _phase("prefill", emit):
        requests = driver.decoding(driver.prompts(cell.batch, cell.prompt_tokens), steps + 3 + lead)
    begin = time.perf_counter()
    with _phase("decode", emit):
        for _ in range(steps):
            driver.engine.step()
        driver.synchronize()
    seconds = time.perf_counter() - begin
    driver.withdraw(requests)
    return {"steps": steps, "ms_per_step": 1000 * seconds / steps}


def _lead(driver: Driver, cell: Cell) -> int:
    """Steps that a cell's first request decodes while its last one is in prefill, about: all are to be there after."""
    return -(-cell.batch * cell.prompt_tokens // driver.engine.config.max_num_batched_tokens)


def _trace(driver: Driver, cell: Cell) -> dict[str, Any]:
    lead = _lead(driver, cell)
    num_output = min(cell.max_output, TRACE_STEPS + 8 + lead)
    requests = driver.decoding(driver.prompts(cell.batch, cell.prompt_tokens), num_output)
    result = trace(driver.engine.step, max(1, min(TRACE_STEPS, num_output - 4 - lead)), driver.synchronize)
    driver.withdraw(requests)
    return result


def _memory(started: Started) -> dict[str, Any]:
    engine, ops = started.engine, started.engine.model.ops
    document: dict[str, Any] = {
        "rows": {row.name: row.num_bytes for row in engine.memory.rows},
        "weights_stored": sum(module.resident_bytes for module in started.manifest.modules),
        "weights_resident": ops.resident.resident_bytes if ops.resident is not None else None,
        "uploaded": ops.resident.uploaded_bytes if ops.resident is not None else None,
        "caches": engine.plan.total_bytes,
        "graphs": engine.runner.graph_bytes,
        "graph_capture_s": engine.runner.capture_seconds,
    }
    if started.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(started.device)
        document |= {
            "allocated": torch.cuda.memory_allocated(started.device),
            "peak_allocated": torch.cuda.max_memory_allocated(started.device),
            "reserved": torch.cuda.memory_reserved(started.device),
            "device_used": total - free,
            "device_total": total,
        }
    return document
