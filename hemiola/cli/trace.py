"""`hemiola trace`: where two engines depart first, and which ops flip the token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hemiola.cli import engine_options
from hemiola.cli.ending import FAILED
from hemiola.cli.prompts import read_prompts
from hemiola.cli.settings import given, parse_arms
from hemiola.config.engine import DTYPES, EngineConfig
from hemiola.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from hemiola.evidence.trace import Side, Trace

_A, _B = "Side A", "Side B"
_ARMS = "Arms of this side, as elsewhere --arms."
_DTYPE = f"Numeric mode of this side: {', '.join(DTYPES)}."
_ENGINE = "hemiola, or transformers (in this process; it has to be installed)."
_INVARIANT = "On a GPU, this side's tokens do not depend on what runs beside them."


def trace(
    ctx: typer.Context,
    a: Annotated[str, typer.Argument(metavar="A", help="Checkpoint folder or hub id, or a stored trace (.json).")],
    b: Annotated[
        str | None, typer.Argument(metavar="[B]", help="The other side; none is only to store A's trace.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_ids: Annotated[
        str | None, typer.Option(metavar="FILE", help="JSON, a list of lists of token ids; the first one is run.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode: one step each after the prompt's.")] = 4,
    store: Annotated[Path | None, typer.Option(metavar="FILE", help="Store A's trace, for another commit.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the errors per layer as SVG.")] = None,
    record: engine_options.RecordFolder = None,
    no_bisect: Annotated[bool, typer.Option("--no-bisect", help="Do not look for the ops that flip a token.")] = False,
    engine_a: Annotated[str, typer.Option(help=_ENGINE, rich_help_panel=_A)] = "hemiola",
    arms_a: Annotated[
        str | None, typer.Option("--arms-a", parser=parse_arms, metavar="ARMS", help=_ARMS, rich_help_panel=_A)
    ] = None,
    dtype_a: Annotated[str | None, typer.Option(help=_DTYPE, rich_help_panel=_A)] = None,
    invariant_a: Annotated[bool, typer.Option("--invariant-a", help=_INVARIANT, rich_help_panel=_A)] = False,
    engine_b: Annotated[str, typer.Option(help=_ENGINE, rich_help_panel=_B)] = "hemiola",
    arms_b: Annotated[
        str | None, typer.Option("--arms-b", parser=parse_arms, metavar="ARMS", help=_ARMS, rich_help_panel=_B)
    ] = None,
    dtype_b: Annotated[str | None, typer.Option(help=_DTYPE, rich_help_panel=_B)] = None,
    invariant_b: Annotated[bool, typer.Option("--invariant-b", help=_INVARIANT, rich_help_panel=_B)] = False,
    kv_cache_dtype: engine_options.KVCacheDtype = None,
    block_size: engine_options.BlockSize = None,
    max_num_batched_tokens: engine_options.MaxNumBatchedTokens = None,
    max_model_len: engine_options.MaxModelLen = None,
    device: engine_options.Device = None,
) -> None:
    """Run the same tokens on two engines and name the first layer and op where they depart (status 1).

    Outputs of ops and layers, recurrent and convolution states and KV are compared, with a bound from two runs of one
    side. Where the best token differs and only arms do, the smallest set of ops that flips it is looked for.
    """
    from hemiola.bench import source_facts
    from hemiola.evidence.trace import Side, Trace, run_side
    from hemiola.evidence.trace import trace as run_trace
    from hemiola.evidence.trace_plot import render_svg

    if b is None and store is None:
        raise ConfigError("one side alone is only to be stored", expected="B, or --store FILE", where="trace")
    source = source_facts()
    shared = given(EngineConfig, ctx.params)
    sides = [_side(name, letter, ctx.params, shared) for name, letter in ((a, "a"), (b, "b")) if name is not None]
    running = [side for side in sides if isinstance(side, Side)]
    ids = [] if len(running) < len(sides) else _prompt(running[0], prompt, prompt_ids)
    if len(running) < len(sides) and (prompt is not None or prompt_ids is not None):
        raise ConfigError("a stored trace has its own prompt", expected="no --prompt, no --prompt-ids", where="trace")
    if b is None:
        if isinstance(sides[0], Trace):
            raise ConfigError("this trace is stored already", found=a, where="--store")
        (run,) = run_side(sides[0], ids, max_tokens)
    else:
        result = run_trace(sides[0], sides[1], ids, max_tokens, bisects=not no_bisect)
        run = result.a
    if store is not None:
        run.write(store)
    if b is None:
        typer.echo(f"stored: {run.describe()}; {len(run.records)} values", err=True)
        return
    if json_file is not None:
        json_file.write_text(json.dumps(result.as_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if plot is not None:
        plot.write_text(render_svg(result), encoding="utf-8")
    for line in result.lines():
        typer.echo(line)
    if record is not None:
        from hemiola.cli.recording import check_unchanged, trace_claim
        from hemiola.evidence.records import append

        check_unchanged(source)
        typer.echo(f"recorded: {append(record, trace_claim(source, result)).id}")
    if result.first is not None or result.first_local is not None:
        raise typer.Exit(FAILED)


def _side(name: str, letter: str, options: Mapping[str, Any], shared: Mapping[str, Any]) -> Side | Trace:
    """Raises: ConfigError for settings of a stored trace, an unknown engine, and arms of transformers."""
    from hemiola.evidence.trace import ENGINES, Side, Trace

    engine = options[f"engine_{letter}"]
    if engine not in ENGINES:
        raise ConfigError("no such engine", found=engine, expected=", ".join(ENGINES), where=f"--engine-{letter}")
    own = {field: options[f"{field}_{letter}"] for field in ("arms", "dtype", "invariant")}
    own = {field: value for field, value in own.items() if value not in (None, False)}
    if name.endswith(".json"):
        if own or engine != "hemiola":
            raise ConfigError(
                "a stored trace has its own settings", found=", ".join([*own, engine]), expected="none", where=name
            )
        return Trace.read(Path(name))
    if engine == "transformers" and own.keys() - {"dtype"}:
        raise ConfigError(
            "transformers has no arms", found=", ".join(own), expected="dtype", where=f"--engine-{letter}"
        )
    return Side(name, {**shared, **own}, engine=engine)


def _prompt(side: Side, text: str | None, file: str | None) -> list[int]:
    """Raises: RequestError for a text without a tokenizer."""
    from hemiola.loading import open_manifest
    from hemiola.text.tokenizer import Tokenizer

    prompt = read_prompts([] if text is None else [text], None, file)[0]
    if not isinstance(prompt, str):
        return list(prompt)
    tokenizer = Tokenizer.from_folder(open_manifest(side.model, side.revision)[0])
    if tokenizer is None:
        raise RequestError("text needs a tokenizer, and this model has none", expected="--prompt-ids")
    return tokenizer.encode(prompt)
