"""`hemiola report`: records as one HTML page, or as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hemiola.cli.ending import FAILED


def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Of the records that --record wrote.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write one HTML page, tables and plots.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the tables as Markdown; on stdout without any FILE.")
    ] = None,
) -> None:
    """Verify the records' chain and show them: UNGATED, VOID, PENDING and UNSTEADY as such (status 1: it is broken).

    Records that differ in hardware, clock state, cache state or workload are not compared; the report says which.
    """
    from hemiola.evidence.records import read
    from hemiola.evidence.report import render_html, render_markdown

    chain = read(folder)
    if out is not None:
        out.write_text(render_html(chain), encoding="utf-8")
    if markdown is not None:
        markdown.write_text(render_markdown(chain), encoding="utf-8")
    if out is None and markdown is None:
        typer.echo(render_markdown(chain), nl=False)
    typer.echo(chain.describe(), err=True)
    if chain.broken_at is not None:
        raise typer.Exit(FAILED)
