"""The command line: `hemiola generate`, `serve`, `load`, `bench` and the others; one file per command.

Commands import torch and the engine only when they run, so that `hemiola --help` answers at once.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from hemiola import __version__
from hemiola.cli.bench import bench
from hemiola.cli.doctor import doctor
from hemiola.cli.ending import Commands
from hemiola.cli.gate import gate
from hemiola.cli.generate import generate
from hemiola.cli.golden import golden
from hemiola.cli.inspect import inspect
from hemiola.cli.legs import legs
from hemiola.cli.load import load
from hemiola.cli.quantize import quantize
from hemiola.cli.report import report
from hemiola.cli.selftest import selftest
from hemiola.cli.serve import serve
from hemiola.cli.simulate import simulate
from hemiola.cli.trace import trace
from hemiola.config.threads import keep_fewer_products, wait_passively

app = typer.Typer(
    cls=Commands,
    help="An inference engine for NVIDIA's Nemotron-H family of hybrid language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(inspect)
app.command()(quantize)
app.command()(bench)
app.command()(doctor)
app.command()(serve)
app.command()(load)
app.command()(simulate)
app.command()(golden)
app.command()(gate)
app.command()(trace)
app.command()(legs)
app.command()(report)
app.command()(selftest)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hemiola {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options that come before a command."""


def main() -> None:
    """Entry point of the `hemiola` script."""
    wait_passively()
    keep_fewer_products()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows "?" for what it lacks
    app(prog_name="hemiola")
