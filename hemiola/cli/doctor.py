"""`hemiola doctor`: whether this machine can run a checkpoint on the device arm, and if not, why."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Annotated

import typer

from hemiola.cli.ending import FAILED
from hemiola.cli.settings import engine_option, given, parse_arms
from hemiola.config.engine import DTYPES, KV_CACHE_DTYPES, EngineConfig

if TYPE_CHECKING:
    from hemiola.doctor import Diagnosis


def doctor(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Checkpoint folder or hub id.",
            show_default="the small model that comes with hemiola",
        ),
    ] = None,
    synthetic: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A model of true shapes with drawn weights, as in `hemiola bench`."),
    ] = None,
    dtype: Annotated[str | None, engine_option("dtype", f"Numeric mode: {', '.join(DTYPES)}.")] = None,
    kv_cache_dtype: Annotated[str | None, engine_option("kv_cache_dtype", f"{', '.join(KV_CACHE_DTYPES)}.")] = None,
    arms: Annotated[
        str | None,
        engine_option("arms", "Arm of every op, or OP=ARM,... for single ops.", parser=parse_arms, metavar="ARMS"),
    ] = None,
    invariant: Annotated[
        bool, engine_option("invariant", "Rows do not depend on their neighbours.", "--invariant")
    ] = False,
    shapes: Annotated[bool, typer.Option("--shapes", help="List every combination of shapes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write the whole diagnosis as one JSON object.")] = False,
) -> None:
    """Try every op's device variants at a checkpoint's own shapes: packing, calls, a graph capture.

    Exit status 1 when an engine in strict mode could not start on the device arm.
    """
    from hemiola.doctor import examine

    diagnosis = examine(model, synthetic, EngineConfig(**given(EngineConfig, ctx.params)))
    if as_json:
        sys.stdout.write(json.dumps(diagnosis.as_dict(), indent=1) + "\n")
    else:
        show(diagnosis, shapes)
    if not diagnosis.can_start_strict:
        raise typer.Exit(FAILED)


def show(diagnosis: Diagnosis, shapes: bool) -> None:
    """Facts, one line per variant and status (or per combination of shapes), and the verdict."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    for facts in (diagnosis.machine, diagnosis.checkpoint, diagnosis.uses):
        for name, value in facts.items():
            shown = f"{value:,}" if isinstance(value, int) else str(value)
            console.print(f"{name.replace('_', ' ')}: {shown}", soft_wrap=True)
    table = Table("op", "variant", "", "status", "at", box=None, pad_edge=False)
    grouped: defaultdict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for finding in diagnosis.findings:
        grouped[(finding.op, finding.variant, finding.what, finding.status)].append(finding.at)
    for (op, variant, what, status), places in sorted(grouped.items()):
        if shapes:
            for place in places:
                table.add_row(op, variant, what, status, place)
        else:
            more = f" and {len(places) - 1} more" if len(places) > 1 else ""
            table.add_row(op, variant, what, status, f"{places[0]}{more}")
    console.print(table)
    if diagnosis.can_start_strict:
        layers = ", ".join(map(str, diagnosis.layers))
        console.print(f"a strict engine ran on the device arm, on layers {layers}", soft_wrap=True)
    for problem in diagnosis.problems:
        console.print(f"problem: {problem}", soft_wrap=True)
