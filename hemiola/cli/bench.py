"""`hemiola bench`: decode, prefill, start and memory of a model on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hemiola.cli import engine_options
from hemiola.cli.ending import FAILED
from hemiola.cli.settings import engine_option, given, parse_arms
from hemiola.config.engine import DTYPES, KV_CACHE_DTYPES, EngineConfig
from hemiola.errors import ConfigError

if TYPE_CHECKING:
    from hemiola.bench import Observation
    from hemiola.evidence.records import Record


def bench(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint folder or hub id.", show_default="the small model that comes with hemiola"),
    ] = None,
    synthetic: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A model of true shapes and formats with drawn weights: lightning-30b, nano-nvfp4-30b, nano-fp8-30b, "
            "nano-bf16-30b, super-120b; with -tiny behind it, a small one for a CPU.",
        ),
    ] = None,
    batch: Annotated[
        list[str] | None,
        typer.Option(metavar="N[xTOKENS]", help="Decode at this batch size after prompts of so many tokens (128)."),
    ] = None,
    prefill: Annotated[
        list[str] | None, typer.Option(metavar="N[xTOKENS]", help="Prefill of so many prompts of so many tokens.")
    ] = None,
    long: Annotated[bool, typer.Option("--long", help="Decode after long prompts, too.")] = False,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Decode steps between the two lengths; 256 at batch 1, else 128.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each cell; the median is reported.")] = 3,
    profile: Annotated[
        bool, typer.Option("--profile", help="Where the time of each decode cell goes on a GPU, kernel by kernel.")
    ] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the document there instead of to stdout.")
    ] = None,
    record: engine_options.RecordFolder = None,
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Compare with this record of --record's folder, where that means something."),
    ] = None,
    dtype: Annotated[str | None, engine_option("dtype", f"Numeric mode: {', '.join(DTYPES)}.")] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(KV_CACHE_DTYPES)}.", show_default="model", rich_help_panel="Engine")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens per step.", show_default="what the cells need, 16384 at most", rich_help_panel="Engine"
        ),
    ] = None,
    arms: Annotated[
        str | None,
        engine_option("arms", "Arm of every op, or OP=ARM,... for single ops.", parser=parse_arms, metavar="ARMS"),
    ] = None,
    no_strict: Annotated[
        bool, engine_option("strict", "Allow counted fallbacks to the reference arm.", "--no-strict")
    ] = False,
    invariant: Annotated[
        bool, engine_option("invariant", "Rows do not depend on their neighbours.", "--invariant")
    ] = False,
    no_cuda_graphs: Annotated[bool, engine_option("cuda_graphs", "Launch every kernel.", "--no-cuda-graphs")] = False,
    no_overlap: Annotated[
        bool, engine_option("overlap", "Wait for a step's ids before the next one.", "--no-overlap")
    ] = False,
) -> None:
    """Measure a model on this machine: one JSON document on stdout, a table on stderr.

    Without --batch and --prefill: decode at batch 1, 8, 32, 64, 128 and 256, prefill of 1 x 8192 and 16 x 1024 tokens.
    A figure is UNGATED unless --record's folder has a green gate of the same commit, engine and formats.
    """
    from hemiola.bench import (
        LONG_CELLS,
        STANDARD_CELLS,
        BenchOptions,
        MeasuredProcessError,
        Nvml,
        cell,
        command_of,
        source_facts,
    )
    from hemiola.bench import observe as run_observed
    from hemiola.evidence.records import read

    source = source_facts()
    chosen = (
        *(cell("decode", text, steps) for text in batch or ()),
        *(cell("prefill", text) for text in prefill or ()),
        *(LONG_CELLS if long else ()),
    )
    if against and record is None:
        raise ConfigError("a record to compare with is looked for in a folder", expected="--record", where="--against")
    others = [read(record).find(prefix) for prefix in against or ()] if record is not None else []
    switches = {"strict": not no_strict, "cuda_graphs": not no_cuda_graphs, "overlap": not no_overlap}
    settings = given(EngineConfig, ctx.params | switches)
    options = BenchOptions(
        model, synthetic, chosen or STANDARD_CELLS, repeats, profile, digest=record is not None, settings=settings
    )

    def progress(what: str) -> None:
        if sys.stderr.isatty():
            typer.secho(f"{what} ...", dim=True, err=True)

    try:
        seen = run_observed(command_of(options), Nvml, progress)
    except MeasuredProcessError as error:
        typer.echo(str(error), err=True)
        if record is not None:
            from hemiola.cli.recording import void_bench_claim
            from hemiola.evidence.records import append

            append(record, void_bench_claim(source, synthetic or Path(model or "shipped").name, str(error)))
        raise typer.Exit(error.status) from None
    document = judged(seen, source, record, others)
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    if json_file is None:
        sys.stdout.write(text)
    else:
        Path(json_file).write_text(text, encoding="utf-8")
    if sys.stderr.isatty() or json_file is not None:
        show(document)
    if any("refused" in row for row in document["cells"]):
        raise typer.Exit(FAILED)


def judged(
    seen: Observation, source: Mapping[str, Any], folder: Path | None, others: Sequence[Record]
) -> dict[str, Any]:
    """The document of a run with what the GPU did in each window and, first in every row, what its tokens rest on.

    source: of `source_facts` before the run. folder: where gates are looked for and every cell is recorded. others: to
    compare every cell with. Raises: EvidenceError where there is a folder and the sources changed since.
    """
    from hemiola.bench import WindowError, machine_facts
    from hemiola.cli.recording import bench_claim, check_unchanged
    from hemiola.evidence.comparison import compare
    from hemiola.evidence.gating import find_gates
    from hemiola.evidence.records import FILE, Chain, append, read

    document = dict(seen.document)
    chain = None
    if folder is not None:
        check_unchanged(source)
        chain = read(folder) if (folder / FILE).exists() else Chain(folder, ())
    machine = machine_facts(document["conditions"]["device"])
    gating = find_gates(chain, source, document["model"], document["engine"], machine, document["paths"]["calls"])
    document = {"gate": gating.describe(), **document, "compared": []}
    rows = []
    for row in document["cells"]:
        if row["kind"] == "decode" and "refused" not in row:
            try:
                nvml = seen.busy(row["window"]["number"]) if "window" in row else NO_GPU
            except WindowError as error:
                nvml = {"busy": None, "why": str(error)}
            row = {**row, "nvml": nvml}
        rows.append({"gate": gating.describe(), **row})
        if folder is None:
            continue
        record = append(folder, bench_claim(source, document, row, gating))
        rows[-1]["record"] = record.id
        document["compared"] += [line for other in others for line in compare(other, record)]
    return {**document, "cells": rows}


NO_GPU = {"busy": None, "why": "no GPU"}


def show(document: dict[str, Any]) -> None:
    """The document as tables on stderr. A line with a figure begins with UNGATED where nothing vouches for it."""
    from rich.console import Console
    from rich.table import Table

    from hemiola.evidence.records import Mark

    conditions, device = document["conditions"], document["conditions"]["device"]
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 150, highlight=False, soft_wrap=True)
    versions = conditions["versions"]
    title = (
        f"{document['model']['name']} on {device['name']}, hemiola {versions['hemiola']} "
        f"({versions['commit'] or 'no commit'}), torch {versions['torch']}, n = {conditions['repeats']}"
    )
    word = f"{Mark.UNGATED} " if document["gate"].startswith(Mark.UNGATED) else ""
    cells = Table(
        *("cell", "ms per step", "tokens/s", "min .. max", "GB per step", "of copy rate", "GPU busy"),
        box=None,
        pad_edge=False,
    )
    for column in cells.columns[1:]:
        column.justify = "right"
    rows = [row for row in document["cells"] if "refused" not in row]
    for row in rows:
        name, *figures = _row(row)
        cells.add_row(word + name, *figures)
    console.print(title, document["gate"], cells, sep="\n", markup=False)
    for row in rows:
        if "profile" in row:
            console.print(f"{word}{row['cell']}, a step by its parts:", _parts(row["profile"]), sep="\n", markup=False)
    lines = [line for row in rows for line in _lines(row)]
    start = " + ".join(f"{name} {seconds:.2f}" for name, seconds in document["start_s"].items() if name != "together")
    lines.append(f"load: {start} = {document['start_s']['together']:.2f} s")
    memory, weights_s = document["memory"], document["start_s"]["weights"]
    if memory["weights_resident"]:
        brought = memory["weights_resident"]
        lines.append(f"weights: {brought / 1e9:.3f} GB / {weights_s:.2f} s = {brought / weights_s / 1e9:.2f} GB/s")
    sizes = ", ".join(f"{name} {memory[name] / 1e9:.3f}" for name in _SIZES if memory.get(name))
    for line in [*lines, f"memory, GB: {sizes}", _rates(document), *document["compared"]]:
        console.print(line if line.startswith((*Mark, "declined")) else word + line, markup=False)
    for row in document["cells"]:
        if "refused" in row:
            console.print(f"NO FIGURE {row['cell']}: {row['refused']}", markup=False)
    console.print(document["paths"]["verdict"], markup=False)


def _parts(profile: list[dict[str, Any]]) -> Any:
    """The largest gap first: what a kernel as fast as memory would save."""
    from rich.table import Table

    table = Table(*("  part", "us", "least", "of copy rate", "gap", "launches"), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for part in profile:
        least = part["floor_us"]
        shares = ("", "") if least is None else (f"{least:,.0f}", f"{least / part['us']:.0%}" if part["us"] else "")
        table.add_row(
            f"  {part['part']}", f"{part['us']:,.0f}", *shares, f"{part['gap_us']:,.0f}", f"{part['launches']:.0f}"
        )
    return table


def _lines(row: dict[str, Any]) -> Iterator[str]:
    """What a row of the table has no room for: prefill with what it is divided by, and the state of the machine."""
    from hemiola.evidence.records import Mark

    tokens = row["batch"] * row["prompt_tokens"]
    asked = f"{row['batch']:,} x {row['prompt_tokens']:,} = {tokens:,} tokens"
    if row["kind"] == "prefill":
        yield f"prefill of {row['cell']}: {asked} / {row['seconds']:.4f} s = {row['tokens_per_s']:,.0f} tokens/s"
        return
    seconds = row["first_token_s"]
    yield (
        f"prefill of {row['cell']}: {asked} / {seconds:.4f} s = {tokens / seconds:,.0f} tokens/s, to every first token "
        f"(n = {len(row['samples_first_token_s'])})"
    )
    nvml = row["nvml"]
    if nvml["busy"] is None:
        yield f"GPU of {row['cell']}: not sampled, {nvml['why']}"
        return
    clocks, watts = nvml["clock_mhz"], nvml["power_w"]
    yield (
        f"GPU of {row['cell']}: busy {nvml['busy']:.1%} ({nvml['samples']} samples in {nvml['window_s']:.2f} s of "
        f"{row['window']['steps']:,} decode steps, {row['window']['ms_per_step']:.3f} ms each)"
        + (f"; SM clock {clocks['min']:.0f} .. {clocks['max']:.0f} MHz" if clocks else "")
        + (f"; {watts['mean']:.0f} W" if watts else "")
    )
    if nvml["unsteady"]:
        yield f"{Mark.UNSTEADY} {row['cell']}: {nvml['unsteady']}"


def _rates(document: dict[str, Any]) -> str:
    return "memory: " + ", ".join(
        f"{kind} {document[kind]['bytes_per_s'] / 1e9:,.0f} GB/s ({document[kind]['way']})" for kind in ("copy", "read")
    )


_SIZES = ("weights_stored", "weights_resident", "caches", "graphs", "allocated", "reserved", "device_used")


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    if row["kind"] == "prefill":
        low, high = (1000 * bound(row["samples_s"]) for bound in (min, max))
        return row["cell"], "", f"{row['tokens_per_s']:,.0f}", f"{low:.1f} .. {high:.1f} ms", "", "", ""
    low, high = min(row["samples_ms"]), max(row["samples_ms"])
    busy = [row[source].get("busy") for source in ("nvml", "trace") if source in row]
    return (
        row["cell"],
        f"{row['ms_per_step']:.3f}",
        f"{row['tokens_per_s']:,.0f}",
        f"{low:.3f} .. {high:.3f}",
        f"{row['bytes_per_step']['total'] / 1e9:.3f}",
        f"{row['fraction_of_copy']:.0%}",
        " / ".join("-" if value is None else f"{value:.0%}" for value in busy),
    )
