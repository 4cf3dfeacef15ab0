"""`hemiola load`: traffic on an OpenAI-compatible server, and the latencies that its clients see."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hemiola.cli import engine_options
from hemiola.errors import ConfigError
from hemiola.load import ARRIVALS, LoadOptions, run_load

if TYPE_CHECKING:
    from hemiola.load import LoadReport

_DEFAULTS = {field.name: field.default for field in fields(LoadOptions)}


def _load_option(field: str, help: str, *names: str, **more: Any) -> Any:
    """Declare the option of a LoadOptions field."""
    shown = str(_DEFAULTS[field]) if isinstance(_DEFAULTS[field], int | float | str) else False
    return typer.Option(*names, help=help, show_default=more.pop("show_default", shown), **more)


def load(
    ctx: typer.Context,
    url: Annotated[str, typer.Argument(metavar="URL", help="Of the server, without /v1.")],
    model: Annotated[str | None, _load_option("model", "Name to ask for; the server's first where not given.")] = None,
    api_key_file: Annotated[str | None, typer.Option(metavar="FILE", help="Its first line is sent as a key.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Chat completions, not plain ones.")] = False,
    num_requests: Annotated[int | None, _load_option("num_requests", "In all.")] = None,
    concurrency: Annotated[
        int | None, _load_option("concurrency", "Closed loop: clients that ask again when answered.")
    ] = None,
    rate_per_s: Annotated[float | None, _load_option("rate_per_s", "Open loop: arrivals per second.")] = None,
    arrivals: Annotated[str | None, _load_option("arrivals", f"Of an open loop: {' or '.join(ARRIVALS)}.")] = None,
    prompt_words: Annotated[
        str | None,
        _load_option(
            "prompt_words",
            "Random words per prompt, or a mix as WORDS:WEIGHT,WORDS:WEIGHT; most are one token.",
            show_default="256",
        ),
    ] = None,
    shared_words: Annotated[int | None, _load_option("shared_words", "Of a shared prefix, on top.")] = None,
    num_prefixes: Annotated[int | None, _load_option("num_prefixes", "Different shared prefixes.")] = None,
    output_tokens: Annotated[int | None, _load_option("output_tokens", "Asked of every answer.")] = None,
    temperature: Annotated[float | None, _load_option("temperature", "0 is greedy.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Exactly output_tokens each.")] = False,
    abandon: Annotated[float | None, _load_option("abandon", "Part of the clients that leave in mid-answer.")] = None,
    timeout_s: Annotated[float | None, _load_option("timeout_s", "Of one request.")] = None,
    seed: Annotated[int | None, _load_option("seed", "Of prompts, arrivals and who leaves.")] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON; - is stdout, without table.")
    ] = None,
    record: engine_options.RecordFolder = None,
    server_device: Annotated[
        str | None, typer.Option(help="What the server runs on, for the record; without it, nothing is compared.")
    ] = None,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Write the latencies' distributions as SVG.")] = None,
) -> None:
    """Send traffic to a server and say what its clients see: times to first token, between tokens, to the end.

    The same seed sends the same prompts to any server; sent twice to one server, its prefix cache knows them.
    """
    names = {field.name for field in fields(LoadOptions)}
    values = {name: value for name, value in ctx.params.items() if name in names and value is not None}
    if prompt_words is not None:
        values["prompt_words"] = _mix(prompt_words)
    if api_key_file is not None:
        values["api_key"] = first_line(api_key_file)
    if record is not None:
        from hemiola.bench import source_facts

        source = source_facts()
    report = asyncio.run(run_load(LoadOptions(**values)))
    if plot is not None:
        from hemiola.cli.distributions import render_svg

        Path(plot).write_text(render_svg(report.latencies()), encoding="utf-8")
    if record is not None:
        from hemiola.cli.recording import check_unchanged, load_claim
        from hemiola.evidence.records import append

        check_unchanged(source)
        typer.echo(f"recorded: {append(record, load_claim(source, report, server_device)).id}", err=True)
    text = json.dumps(report.as_dict(), indent=1, allow_nan=False) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
        return
    if json_file is not None:
        Path(json_file).write_text(text, encoding="utf-8")
    _show(report)


def _mix(text: str) -> tuple[tuple[int, float], ...]:
    try:
        parts = (part.partition(":") for part in text.split(","))
        return tuple((int(words), float(weight or 1)) for words, _, weight in parts)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not of the form WORDS or WORDS:WEIGHT,WORDS:WEIGHT") from None


def first_line(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8").split("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("cannot be read", found=error, where=file) from error


def _show(report: LoadReport) -> None:
    from rich.console import Console
    from rich.table import Table

    values = report.as_dict()
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in values["outcomes"].items())
    tokens = ", ".join(f"{_count(values[f'{name}_tokens'])} {name}" for name in ("prompt", "cached", "output"))
    rate = values["output_tokens_per_s"]
    console = Console()
    console.print(
        f"{outcomes} in {report.seconds:.2f} s: {values['requests_per_s']:.2f} requests/s, "
        f"{'unknown' if rate is None else f'{rate:.1f}'} output tokens/s; tokens of finished ones: {tokens}; "
        f"this client took {report.client_s:.2f} s of processor time",
        highlight=False,
    )
    table = Table("ms", "mean", "p50", "p90", "p95", "p99", "max", "of", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, summary in values["latencies_s"].items():
        if summary is not None:
            figures = (summary[key] * 1000 for key in ("mean", "p50", "p90", "p95", "p99", "max"))
            table.add_row(name.replace("_", " "), *(f"{figure:,.2f}" for figure in figures), f"{summary['count']:,}")
    console.print(table)


def _count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"
