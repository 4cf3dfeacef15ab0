"""`hemiola serve`: OpenAI's HTTP API over one model. Its engine options are those of `hemiola generate`."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.models import OptionInfo

from hemiola.cli.generate import generate
from hemiola.cli.memory import show_memory
from hemiola.cli.settings import field_option, given, parse_bytes
from hemiola.config.engine import EngineConfig
from hemiola.config.serve import ServeConfig
from hemiola.errors import ConfigError


def _serve_option(field: str, help: str, *names: str, **more: Any) -> Any:
    """Declare the option of a ServeConfig field."""
    return field_option(ServeConfig, field, help, names, **more)


def serve(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Checkpoint folder or hub id.",
            show_default="the small model that comes with hemiola",
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    host: Annotated[str | None, _serve_option("host", "Address to listen on; by default only this machine.")] = None,
    port: Annotated[int | None, _serve_option("port", "Port to listen on; 0 takes a free one.")] = None,
    api_key_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="One API key per line; clients have to send one of them as bearer token."),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        _serve_option("allowed_origins", "Web pages of this origin may call it; repeatable.", "--allow-origin"),
    ] = None,
    served_model_name: Annotated[
        str | None, _serve_option("served_model_name", "What clients call the model; the name it was loaded by.")
    ] = None,
    max_body_bytes: Annotated[
        int | None,
        _serve_option("max_body_bytes", "Of one request.", parser=parse_bytes, metavar="BYTES"),
    ] = None,
    max_prompt_tokens: Annotated[int | None, _serve_option("max_prompt_tokens", "Of one prompt.")] = None,
    max_logprobs: Annotated[int | None, _serve_option("max_logprobs", "Alternatives per token.")] = None,
    max_waiting: Annotated[int | None, _serve_option("max_waiting", "Requests that wait for their first step.")] = None,
    max_streams: Annotated[int | None, _serve_option("max_streams", "Requests under way.")] = None,
    drain_seconds: Annotated[
        float | None, _serve_option("drain_seconds", "After SIGTERM, for running requests to finish.")
    ] = None,
    log_requests: Annotated[
        bool, _serve_option("log_requests", "Write prompts and answers to the log.", "--log-requests")
    ] = False,
    log_format: Annotated[str, typer.Option(help="text or json, on stderr.")] = "text",
    traces: Annotated[
        bool, typer.Option("--traces", help="Send OpenTelemetry spans to where the OTEL_* variables say.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show on stderr where the memory goes, beside a log of JSON, too.")
    ] = False,
    **engine: Any,
) -> None:
    """Serve a model over HTTP, as OpenAI's clients expect it, with a page to try it at /."""
    try:
        from hemiola.serve.logs import FORMATS, set_up_logging
        from hemiola.serve.server import Server
        from hemiola.serve.service import Service
        from hemiola.serve.traces import tracer_provider
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the server's packages are not installed", found=f"no {error.name}", remedy="pip install 'hemiola[serve]'"
        ) from error
    if log_format not in FORMATS:
        raise ConfigError("unknown value", found=log_format, expected=" or ".join(FORMATS), where="log_format")
    options = ctx.params | {"api_keys": _read_keys(api_key_file) if api_key_file else ()}
    options["allowed_origins"] = tuple(allowed_origins or ())
    config = ServeConfig(**given(ServeConfig, options))
    provider = tracer_provider() if traces else None

    from hemiola.front import Front
    from hemiola.loading import load

    loaded = load(model, EngineConfig(**_engine_settings(engine)), revision=revision)
    for note in loaded.notes:
        typer.echo(f"note: {note}", err=True)
    if verbose or log_format == "text":
        show_memory(loaded.engine.memory)
    set_up_logging(log_format)
    name = config.served_model_name or (Path(model).name if model is not None else "hemiola")
    server = Server(Service(Front(loaded.engine, loaded.tokenizer), config, name), provider)
    # The server drains at SIGTERM, and raises the signal again when it is done: then there is nothing left to do.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    server.run()


def _read_keys(file: str) -> tuple[str, ...]:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("cannot be read", found=error, where=file) from error
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise ConfigError("no API key", expected="one per line", where=file)
    return keys


def _engine_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of EngineConfig; an option no_X is the field X, turned off."""
    negated = {name.removeprefix("no_"): not value for name, value in options.items() if name.startswith("no_")}
    return given(EngineConfig, {**options, **negated})


def _with_engine_options(command: Any) -> Any:
    """Give a command that takes **engine the engine options of `hemiola generate`."""
    own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
    taken = {parameter.name for parameter in own}
    hints = get_type_hints(command, include_extras=True) | {
        name: hint
        for name, hint in get_type_hints(generate, include_extras=True).items()
        if name not in taken and _is_engine_option(hint)
    }
    more = [p for p in inspect.signature(generate).parameters.values() if p.name in hints and p.name not in taken]
    parameters = [p.replace(annotation=hints[p.name], kind=p.KEYWORD_ONLY) for p in [*own, *more]]
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _is_engine_option(hint: Any) -> bool:
    options = [entry for entry in getattr(hint, "__metadata__", ()) if isinstance(entry, OptionInfo)]
    return any(option.rich_help_panel == "Engine" for option in options)


serve = _with_engine_options(serve)
