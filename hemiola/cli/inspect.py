"""`hemiola inspect`: what a checkpoint is and what running it costs, from headers alone."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer


def inspect(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Checkpoint folder or hub id.",
            show_default="the small model that comes with hemiola",
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    modules: Annotated[bool, typer.Option("--modules", help="List every module, on disk and in the run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write the whole report as one JSON object.")] = False,
) -> None:
    """Say what a checkpoint holds and what running it costs: schemes, bytes, state, KV, bytes per token.

    Reads headers only; no weight is loaded.
    """
    from rich.console import Console

    from hemiola.inspect import build_report, render, to_json
    from hemiola.loading import open_manifest

    _, config, manifest = open_manifest(model, revision)
    report = build_report(manifest, config)
    if as_json:
        sys.stdout.write(json.dumps(to_json(report), indent=1, allow_nan=False) + "\n")
    else:
        render(report, Console(), modules)
