"""`hemiola golden`: an oracle's greedy tokens with their log-probabilities, for `hemiola gate`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hemiola.cli import engine_options
from hemiola.cli.load import first_line
from hemiola.cli.prompts import read_prompts
from hemiola.cli.settings import given
from hemiola.config.engine import EngineConfig
from hemiola.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from hemiola.evidence import Golden
    from hemiola.front import Prompt
    from hemiola.text.tokenizer import Tokenizer

_SERVER = "A server as oracle"
_ORACLES = ("reference", "transformers")


def golden(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint folder or hub id.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; repeatable.")] = None,
    prompt_file: Annotated[str | None, typer.Option(metavar="FILE", help="UTF-8 text, one prompt per line.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(metavar="FILE", help="JSON, a list of lists of token ids.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each prompt, past the end of text.")] = 48,
    top_k: Annotated[int, typer.Option(min=1, help="Log-probabilities per position.")] = 5,
    oracle: Annotated[
        str,
        typer.Option(help="Where no server is given: reference, hemiola's reference arm, or transformers in process."),
    ] = "reference",
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Ask this OpenAI-compatible server (vLLM's fields) that serves MODEL. "
            "Its --server-device, --dtype and --kv-cache-dtype have to be said.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    server_device: Annotated[str | None, typer.Option(help="What it runs on.", rich_help_panel=_SERVER)] = None,
    server_engine: Annotated[
        str | None,
        typer.Option(help="Its name and version.", show_default="what it says of itself", rich_help_panel=_SERVER),
    ] = None,
    server_model: Annotated[
        str | None, typer.Option(help="Name to ask for; its first where not given.", rich_help_panel=_SERVER)
    ] = None,
    api_key_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Its first line is sent as a key.", rich_help_panel=_SERVER)
    ] = None,
    dtype: engine_options.Dtype = None,
    kv_cache_dtype: engine_options.KVCacheDtype = None,
    device: engine_options.Device = None,
    max_num_seqs: engine_options.MaxNumSeqs = None,
    max_model_len: engine_options.MaxModelLen = None,
) -> None:
    """Record what an oracle answers: greedy tokens, its best log-probabilities, and its own noise.

    The file says which checkpoint, configuration and dtypes it is of; `hemiola gate` takes it for no other.
    """
    prompts = read_prompts(prompt or [], prompt_file, prompt_ids)
    settings: dict[str, Any] = {"arms": "reference", "prefix_caching": False} | given(EngineConfig, ctx.params)
    EngineConfig(**settings)  # a server's dtypes are held to the same names
    if oracle not in _ORACLES or (server is not None and oracle != "reference"):
        raise ConfigError(
            "no such oracle" if server is None else "two oracles",
            found=oracle,
            expected=" or ".join(_ORACLES) if server is None else "--server alone",
            where="--oracle",
        )
    if oracle == "transformers":
        result = _run_transformers(ctx.params, settings, prompts)
    elif server is None:
        from hemiola.evidence import capture
        from hemiola.llm import LLM

        llm = LLM(model, revision=revision, **settings)
        result = capture(llm, _ids(prompts, llm.loaded.tokenizer), max_tokens, top_k)
    else:
        result = _ask(server, ctx.params, prompts)
    result.write(out)
    if (noise := result.noise) is not None:
        typer.echo(
            f"{result.engine}: {len(result.items)} prompts, {noise.positions} positions; decode against prefill: mean "
            f"{noise.mean_abs_dlogp:.4f}, best token differs at {noise.argmax_differs:.2%}, widest margin "
            f"{noise.widest_margin_of_a_differing_argmax:.3f}",
            err=True,
        )


def _run_transformers(options: Mapping[str, Any], settings: Mapping[str, Any], prompts: Sequence[Prompt]) -> Golden:
    """Raises: ConfigError for a KV cache in FP8, EvidenceError where transformers cannot be used."""
    from hemiola.evidence import Oracle, capture_from_transformers
    from hemiola.loading import open_manifest
    from hemiola.text.tokenizer import Tokenizer

    if options["kv_cache_dtype"] == "fp8":
        raise ConfigError("transformers keeps KV in the activation dtype", found="fp8", where="--kv-cache-dtype")
    model, revision = options["model"], options["revision"]
    ids = _ids(prompts, Tokenizer.from_folder(open_manifest(model, revision)[0]))
    oracle = Oracle(model, settings, revision)
    return capture_from_transformers(
        oracle, ids, options["max_tokens"], options["top_k"], progress=_progress(len(prompts))
    )


def _progress(total: int) -> Callable[[int], None]:
    def progress(done: int) -> None:
        if sys.stderr.isatty():
            typer.secho(f"{done} of {total} prompts", dim=True, err=True)

    return progress


def _ask(url: str, options: Mapping[str, Any], prompts: Sequence[Prompt]) -> Golden:
    """The golden of a server. Raises: ConfigError when what it does not say of itself is not said."""
    from hemiola.evidence import Server, capture_from_server, identify
    from hemiola.loading import open_manifest
    from hemiola.text.tokenizer import Tokenizer

    device, dtype, kv_dtype = (options[name] for name in ("server_device", "dtype", "kv_cache_dtype"))
    if device is None or dtype in (None, "auto") or kv_dtype in (None, "auto"):
        raise ConfigError(
            "what the server runs on and in is not said",
            expected="--server-device, --dtype and --kv-cache-dtype (model or fp8)",
            where="--server",
        )
    key_file = options["api_key_file"]
    server = Server(
        url,
        device=device,
        dtype=dtype,
        kv_dtype=dtype if kv_dtype == "model" else kv_dtype,
        engine=options["server_engine"],
        model=options["server_model"],
        api_key=None if key_file is None else first_line(key_file),
    )
    folder, config, manifest = open_manifest(options["model"], options["revision"])
    ids = _ids(prompts, Tokenizer.from_folder(folder))

    identity = identify(manifest, config)
    return capture_from_server(server, identity, ids, options["max_tokens"], options["top_k"], _progress(len(prompts)))


def _ids(prompts: Sequence[Prompt], tokenizer: Tokenizer | None) -> list[list[int]]:
    """Raises: RequestError for a text without a tokenizer."""
    result = []
    for prompt in prompts:
        if isinstance(prompt, str):
            if tokenizer is None:
                raise RequestError("text needs a tokenizer, and this model has none", expected="--prompt-ids")
            result.append(tokenizer.encode(prompt))
        else:
            result.append(list(prompt))
    return result
