"""`hemiola gate`: whether an engine gives an oracle's tokens, and where they part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hemiola.cli import engine_options
from hemiola.cli.ending import FAILED
from hemiola.cli.settings import engine_option, given
from hemiola.config.engine import EngineConfig


def gate(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint folder or hub id.")],
    golden: Annotated[Path, typer.Argument(metavar="GOLDEN", help="A file that `hemiola golden` wrote.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    prefill_only: Annotated[
        bool, typer.Option("--prefill-only", help="Whole sequences as prompts; no decoding.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON.")] = None,
    record: engine_options.RecordFolder = None,
    dtype: engine_options.Dtype = None,
    kv_cache_dtype: engine_options.KVCacheDtype = None,
    block_size: engine_options.BlockSize = None,
    max_num_batched_tokens: engine_options.MaxNumBatchedTokens = None,
    max_num_seqs: engine_options.MaxNumSeqs = None,
    max_model_len: engine_options.MaxModelLen = None,
    device: engine_options.Device = None,
    arms: engine_options.Arms = None,
    invariant: engine_options.Invariant = False,
    no_cuda_graphs: engine_options.NoCudaGraphs = False,
    no_overlap: engine_options.NoOverlap = False,
    no_strict: Annotated[
        bool, engine_option("strict", "Count fallbacks, which is refused at the end with their list.", "--no-strict")
    ] = False,
) -> None:
    """Run a golden's prompts and give a verdict: STRICT PASS, NOISE PASS or DIVERGENCE (status 1).

    No verdict (status 2): another checkpoint, configuration or dtype, nothing to compare, a path that fell back.
    """
    from hemiola.bench import source_facts
    from hemiola.evidence import MODES, Golden, Verdict, check_identity, identify
    from hemiola.evidence import gate as run_gate
    from hemiola.llm import LLM
    from hemiola.loading import open_manifest

    source = source_facts()
    known = Golden.read(golden)
    _, config, manifest = open_manifest(model, revision)
    identity = identify(manifest, config)
    check_identity(known, identity)
    switches = {
        "strict": not no_strict,
        "cuda_graphs": not no_cuda_graphs,
        "overlap": not no_overlap,
        "prefix_caching": False,
    }
    llm = LLM(model, revision=revision, **given(EngineConfig, ctx.params | switches))
    for note in llm.loaded.notes:
        typer.echo(f"note: {note}", err=True)
    result = run_gate(llm, known, ("prefill",) if prefill_only else MODES, identity)
    document = result.as_dict()
    for line in result.lines():
        typer.echo(line)
    if record is not None:
        from hemiola.cli.recording import check_unchanged, gate_claim
        from hemiola.evidence.records import append

        check_unchanged(source)
        document["record"] = append(record, gate_claim(source, model, llm, identity, result)).id
        typer.echo(f"recorded: {document['record']}")
    if json_file is not None:
        json_file.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if result.verdict is Verdict.DIVERGENCE:
        raise typer.Exit(FAILED)
