"""`hemiola simulate`: the engine's scheduler and caches on a trace of arrivals, without a model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hemiola.cli import engine_options
from hemiola.cli.settings import engine_option, given, parse_bytes
from hemiola.config.engine import EngineConfig
from hemiola.errors import ConfigError, RequestError
from hemiola.simulate.generate import DEFAULTS, KINDS, TraceOptions, generate_trace
from hemiola.simulate.trace import Arrival, read_trace, write_arrival

if TYPE_CHECKING:
    from hemiola.simulate.cost import CostModel
    from hemiola.simulate.geometry import Geometry


def _trace_option(field: str, help: str) -> Any:
    """Declare the option of a TraceOptions field."""
    return typer.Option(help=help, show_default=str(DEFAULTS[field]), rich_help_panel="With --generate")


def simulate(
    ctx: typer.Context,
    trace: Annotated[
        str | None,
        typer.Argument(
            metavar="TRACE",
            help="JSON Lines, one arrival per line; - is standard input. Keys: time_s (or follow_up_of, an earlier "
            "request_id, and think_s after its end), prompt (token ids, or segments \\[name, length]: equal names are "
            "equal tokens), output_tokens; optional request_id, priority, abort_after_s.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint folder or hub id; headers only are read.",
            show_default="the small model that comes with hemiola",
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="The model's config.json alone, in the place of --model.")
    ] = None,
    cost: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="JSON with any of fixed_s, decode_row_s, prefill_token_s, device_bytes_per_s, host_bytes_per_s; the "
            "others are assumed. The report says them all.",
        ),
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the whole report as JSON; - is stdout, without tables."),
    ] = None,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Write the pools over time as SVG.")] = None,
    generate: Annotated[
        str | None, typer.Option(metavar="|".join(KINDS), help="Write a trace of this kind to stdout instead.")
    ] = None,
    num_requests: Annotated[
        int | None, _trace_option("num_requests", "Lines; of a chat, turns of all conversations.")
    ] = None,
    rate_per_s: Annotated[float | None, _trace_option("rate_per_s", "Arrivals, or conversations, per second.")] = None,
    prompt_tokens: Annotated[int | None, _trace_option("prompt_tokens", "Mean, of what is not shared.")] = None,
    output_tokens: Annotated[int | None, _trace_option("output_tokens", "Mean.")] = None,
    shared_tokens: Annotated[int | None, _trace_option("shared_tokens", "Of a system prompt (not poisson).")] = None,
    num_prefixes: Annotated[int | None, _trace_option("num_prefixes", "System prompts (shared-prefix).")] = None,
    num_turns: Annotated[int | None, _trace_option("num_turns", "Turns of a conversation (chat).")] = None,
    think_s: Annotated[float | None, _trace_option("think_s", "Mean time between answer and next turn (chat).")] = None,
    seed: Annotated[int | None, _trace_option("seed", "Of the trace.")] = None,
    dtype: engine_options.Dtype = None,
    kv_cache_dtype: engine_options.KVCacheDtype = None,
    block_size: engine_options.BlockSize = None,
    max_num_batched_tokens: engine_options.MaxNumBatchedTokens = None,
    max_num_seqs: engine_options.MaxNumSeqs = None,
    max_model_len: engine_options.MaxModelLen = None,
    cache_bytes: Annotated[
        int | None,
        engine_option(
            "cache_bytes",
            "For KV blocks and states, such as 40GiB; not clamped to this machine's memory.",
            parser=parse_bytes,
            metavar="BYTES",
        ),
    ] = None,
    no_prefix_caching: engine_options.NoPrefixCaching = False,
    snapshot_bytes: engine_options.SnapshotBytes = None,
    host_snapshot_bytes: engine_options.HostSnapshotBytes = None,
    swap_bytes: engine_options.SwapBytes = None,
    prefill_tokens_per_s: engine_options.PrefillTokensPerS = None,
    host_bytes_per_s: engine_options.HostBytesPerS = None,
) -> None:
    """Run the engine's scheduler and caches on a trace of arrivals, with a cost model in the place of the model.

    Says what is reused and why not more, how long requests wait, who gives way, and how full the caches are.
    """
    options = ctx.params | {"prefix_caching": not no_prefix_caching}
    trace_options = given(TraceOptions, options)
    if generate is None:
        from hemiola.simulate.cost import CostModel

        if trace_options:
            raise RequestError("these options are for --generate", found=_names(trace_options))
        if trace is None:
            raise RequestError("no trace", expected="a file, - for standard input, or --generate")
        if config is not None and (model is not None or revision is not None):
            raise RequestError(
                "one model too many", found="--config with --model or --revision", expected="one of them"
            )
        arrivals = read_trace(_read_text(trace).split("\n"), "standard input" if trace == "-" else trace)
        engine_config = EngineConfig(**_engine_options(options))
        costs = CostModel.read(_read_json(cost) if cost is not None else {}, engine_config, cost or "cost")
        _simulate(arrivals, _geometry(model, revision, config, engine_config), engine_config, costs, json_file, plot)
    else:
        asked = {name for name, value in ctx.params.items() if value is not None and value is not False}
        if unused := asked - trace_options.keys() - {"generate"}:
            raise RequestError("--generate only writes a trace", found=_names(unused), expected="options of the trace")
        for arrival in generate_trace(generate, trace_options):
            typer.echo(write_arrival(arrival))


def _names(options: Iterable[str]) -> str:
    """As the command line spells them."""
    special = {"trace": "TRACE", "json_file": "--json"}
    return ", ".join(special.get(name, f"--{name.replace('_', '-')}") for name in sorted(options))


def _engine_options(options: dict[str, Any]) -> dict[str, Any]:
    """`seed` is the trace's here."""
    values = given(EngineConfig, options)
    values.pop("seed", None)
    return values


def _geometry(model: str | None, revision: str | None, config_file: str | None, config: EngineConfig) -> Geometry:
    from hemiola.config.model import NemotronHConfig
    from hemiola.formats.declaration import read_declaration
    from hemiola.loading import activation_dtype, kv_is_fp8, open_manifest
    from hemiola.simulate.geometry import Geometry

    if config_file is None:
        folder, model_config, manifest = open_manifest(model, revision)
        is_fp8 = kv_is_fp8(config, manifest)
    else:
        folder = Path(config_file)
        model_config = NemotronHConfig.from_file(folder)
        declared = read_declaration(folder.parent, model_config.quantization).kv_cache
        is_fp8 = (declared or "model" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype) == "fp8"
    for warning in model_config.warnings:
        typer.echo(f"note: {warning}", err=True)
    item = activation_dtype(config, model_config).itemsize
    return Geometry(str(folder), model_config, item, 1 if is_fp8 else item)


def _simulate(
    arrivals: list[Arrival],
    geometry: Geometry,
    config: EngineConfig,
    cost: CostModel,
    json_file: str | None,
    plot: str | None,
) -> None:
    from rich.console import Console

    from hemiola.simulate.plot import render_svg
    from hemiola.simulate.report import build_report, to_json
    from hemiola.simulate.run import Simulation
    from hemiola.simulate.table import render

    plan = geometry.plan(config)
    for note in plan.notes:
        typer.echo(f"note: {note}", err=True)
    max_model_len, chunk_size = geometry.max_model_len(config), geometry.chunk_size
    run = Simulation(arrivals, plan, config, cost, max_model_len=max_model_len, chunk_size=chunk_size).run()
    report = build_report(run, geometry, config, cost)
    if plot is not None:
        Path(plot).write_text(render_svg(report), encoding="utf-8")
    text = json.dumps(to_json(report), indent=1, allow_nan=False) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
        return
    if json_file is not None:
        Path(json_file).write_text(text, encoding="utf-8")
    render(report, Console())


def _read_text(file: str) -> str:
    """Of a file, or of standard input for "-". Raises: RequestError when there is none, or no UTF-8."""
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError("cannot be read", found=error, expected="a file of UTF-8 text", where=file) from error


def _read_json(file: str) -> object:
    try:
        return json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        raise ConfigError("not valid JSON", found=error, where=file) from error
