"""`hemiola selftest`: whether each instrument goes red when something is broken."""

from __future__ import annotations

import typer

from hemiola.cli.ending import FAILED


def selftest() -> None:
    """Break each instrument on purpose and show that it goes red (status 1: one did not, or was red unbroken).

    Runs on the CPU in seconds, on a small checkpoint that it writes to a temporary folder.
    """
    from rich.console import Console
    from rich.table import Table

    from hemiola.selftest import selftest as run_selftest

    table = Table("instrument", "broken", "saw", "", box=None, pad_edge=False)
    wrong = count = 0
    for outcome in run_selftest():
        count, wrong = count + 1, wrong + (not outcome.is_right)
        table.add_row(outcome.instrument, outcome.broken, outcome.saw, "ok" if outcome.is_right else "WRONG")
    Console(highlight=False, markup=False).print(table)
    typer.echo(f"{count - wrong} of {count} as they have to be")
    if wrong:
        raise typer.Exit(FAILED)
