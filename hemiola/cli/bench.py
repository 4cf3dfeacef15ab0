"""`hemiola bench`: decode, prefill, start and memory of a model on this machine."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from hemiola.cli.settings import engine_option, given, parse_arms
from hemiola.config.engine import DTYPES, KV_CACHE_DTYPES, EngineConfig


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
    kernels: Annotated[bool, typer.Option("--kernels", help="Trace the kernels of each decode cell.")] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the document there instead of to stdout.")
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
    """
    from hemiola.bench import LONG_CELLS, STANDARD_CELLS, BenchOptions, cell, run_bench

    imports_s = seconds_since_process_start()
    chosen = (
        *(cell("decode", text, steps) for text in batch or ()),
        *(cell("prefill", text) for text in prefill or ()),
        *(LONG_CELLS if long else ()),
    )
    switches = {"strict": not no_strict, "cuda_graphs": not no_cuda_graphs, "overlap": not no_overlap}
    settings = given(EngineConfig, ctx.params | switches)
    options = BenchOptions(model, synthetic, chosen or STANDARD_CELLS, repeats, kernels, settings)

    def progress(what: str) -> None:
        if sys.stderr.isatty():
            typer.secho(f"{what} ...", dim=True, err=True)

    document = run_bench(options, imports_s, progress)
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    if json_file is None:
        sys.stdout.write(text)
    else:
        Path(json_file).write_text(text, encoding="utf-8")
    if sys.stderr.isatty() or json_file is not None:
        show(document)


def seconds_since_process_start() -> float | None:
    """None where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def show(document: dict[str, Any]) -> None:
    """The document as tables on stderr."""
    from rich.console import Console
    from rich.table import Table

    conditions, device = document["conditions"], document["conditions"]["device"]
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 150, highlight=False)
    versions = conditions["versions"]
    title = (
        f"{document['model']} on {device.get('name', device['type'])}, hemiola {versions['hemiola']} "
        f"({versions['commit'] or 'no commit'}), torch {versions['torch']}, n = {conditions['repeats']}"
    )
    cells = Table(
        *("cell", "ms per step", "tokens/s", "min .. max", "GB per step", "of copy rate", "GPU busy"),
        box=None,
        pad_edge=False,
    )
    for column in cells.columns[1:]:
        column.justify = "right"
    for row in document["cells"]:
        cells.add_row(*_row(row))
    console.print(title, cells, sep="\n")
    start = ", ".join(f"{name} {seconds:.2f}" for name, seconds in document["start_s"].items())
    console.print(f"start, s: {start}")
    memory = document["memory"]
    sizes = ", ".join(f"{name} {memory[name] / 1e9:.3f}" for name in _SIZES if memory.get(name))
    console.print(f"memory, GB: {sizes}")
    console.print(f"copy: {document['copy']['bytes_per_s'] / 1e9:,.0f} GB/s ({document['copy']['way']})")
    console.print(document["paths"]["verdict"])


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
