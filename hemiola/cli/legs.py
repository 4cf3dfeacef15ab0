"""`hemiola legs`: one checkpoint on several choices of arms, each run a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hemiola.cli import engine_options
from hemiola.cli.ending import FAILED
from hemiola.cli.settings import parse_arms
from hemiola.config.engine import KV_CACHE_DTYPES
from hemiola.errors import ConfigError

if TYPE_CHECKING:
    from hemiola.evidence.legs import Leg


def legs(
    leg: Annotated[
        list[str],
        typer.Option(metavar="NAME=ARMS", help="A leg and its arms, as elsewhere --arms; the first is the base."),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint folder or hub id.", show_default="the small model that comes with hemiola"),
    ] = None,
    synthetic: Annotated[
        str | None, typer.Option(metavar="NAME", help="As in `hemiola bench`; it has no golden.")
    ] = None,
    golden: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of the checkpoint: every leg is held to it once.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of every leg; their order turns round each time.")] = 4,
    batch: Annotated[
        list[str] | None, typer.Option(metavar="N[xTOKENS]", help="Decode, as in `hemiola bench`; 1 where not given.")
    ] = None,
    prefill: Annotated[
        list[str] | None, typer.Option(metavar="N[xTOKENS]", help="Prefill, as in `hemiola bench`.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="As in `hemiola bench`.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON.")] = None,
    record: engine_options.RecordFolder = None,
    dtype: engine_options.Dtype = None,
    kv_cache_dtype: Annotated[
        str, typer.Option(help=f"{', '.join(KV_CACHE_DTYPES)}.", rich_help_panel="Engine")
    ] = "model",
    gate_max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Prompts of the golden that run together.")
    ] = None,
    invariant: engine_options.Invariant = False,
    no_cuda_graphs: engine_options.NoCudaGraphs = False,
    no_overlap: engine_options.NoOverlap = False,
) -> None:
    """Measure engines that differ in arms alone: a table of medians, spread and gate verdicts, and what differs.

    Every run is one process of `hemiola bench`, strict, whose counters have to show the leg's arms; a leg that cannot
    is VOID (status 1, as is a red gate). What changes its sign between repeats, or lies among the other's times, is no
    difference.
    """
    from hemiola.bench import source_facts
    from hemiola.evidence.legs import Processes, run_legs
    from hemiola.loading import shipped_model

    if synthetic is not None and (model is not None or golden is not None):
        raise ConfigError("a synthetic model is no checkpoint", expected="no --model, no --golden", where="--synthetic")
    name = synthetic or model or str(shipped_model())
    cells = [("--batch", text) for text in batch or ([] if prefill else ["1"])]
    cells += [("--prefill", text) for text in prefill or []]
    processes = Processes(
        ("--model" if synthetic is None else "--synthetic", name),
        golden,
        [
            *_valued("--dtype", dtype),
            *_valued("--kv-cache-dtype", kv_cache_dtype),
            *(["--invariant"] if invariant else []),
            *(["--no-cuda-graphs"] if no_cuda_graphs else []),
            *(["--no-overlap"] if no_overlap else []),
        ],
        [*(word for cell in cells for word in cell), *_valued("--steps", steps)],
        [*_valued("--max-num-seqs", gate_max_num_seqs), *_valued("--record", record)],
    )

    def progress(what: str) -> None:
        if sys.stderr.isatty():
            typer.secho(f"{what} ...", dim=True, err=True)

    source = source_facts()
    result = run_legs(name, [_leg(text) for text in leg], repeats, processes.measure, processes.gate, progress)
    if json_file is not None:
        json_file.write_text(json.dumps(result.as_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    for line in result.lines():
        typer.echo(line)
    if record is not None:
        from hemiola.cli.recording import check_unchanged, command_line
        from hemiola.evidence.records import append

        check_unchanged(source)
        typer.echo(f"recorded: {append(record, result.claim(command_line(), source)).id}")
    if result.is_red:
        raise typer.Exit(FAILED)


def _leg(text: str) -> Leg:
    """Raises: ConfigError."""
    from hemiola.evidence.legs import Leg

    name, equals, arms = text.partition("=")
    if not (name.strip() and equals and arms):
        raise ConfigError(
            "no leg", found=text, expected="NAME=ARMS, such as b=device,mamba2_update=reference", where="--leg"
        )
    return Leg(name.strip(), parse_arms(arms), arms)


def _valued(option: str, value: object) -> list[str]:
    return [] if value is None else [option, str(value)]
