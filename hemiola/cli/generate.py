"""`hemiola generate`: answers to one prompt as they appear, or to many as one batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from hemiola.cli import engine_options
from hemiola.cli.answers import batch_figures, run_figures, stream_answer, write_answers, write_json
from hemiola.cli.memory import show_memory
from hemiola.cli.prompts import read_prompts
from hemiola.cli.settings import engine_option, given, parse_biases, parse_bytes, sampling_option
from hemiola.config.engine import DTYPES, EngineConfig
from hemiola.config.sampling import SamplingParams
from hemiola.errors import RequestError

if TYPE_CHECKING:
    from hemiola.front import Prompt
    from hemiola.llm import LLM


def generate(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint folder or hub id.", show_default="the small model that comes with hemiola"),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt; repeatable. Without any, standard input is the prompt.")
    ] = None,
    prompt_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="UTF-8 text, one prompt per line; all run as one batch.")
    ] = None,
    prompt_ids: Annotated[
        str | None, typer.Option(metavar="FILE", help="JSON, a list of lists of token ids; all run as one batch.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send each prompt as a user's message through the chat template.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Write one JSON object per prompt and line, in order, and nothing else to stdout: prompt_ids, "
            "output_ids, text, finish_reason, logprobs (per output token a list of pairs of id and log-probability, "
            "best first) and prompt_logprobs (the same per prompt token, null for the first). Both are null when not "
            "asked for; a log-probability of -inf is null; text is empty without a tokenizer. With --n above 1, one "
            "object per choice, with its index as choice.",
        ),
    ] = False,
    n: Annotated[int | None, sampling_option("n", "Choices per prompt.")] = None,
    max_tokens: Annotated[int | None, sampling_option("max_tokens", "New tokens at most.")] = None,
    min_tokens: Annotated[int | None, sampling_option("min_tokens", "New tokens before anything may end it.")] = None,
    temperature: Annotated[float | None, sampling_option("temperature", "0 is greedy.")] = None,
    top_k: Annotated[int | None, sampling_option("top_k", "Sample from the k best; 0 is all.")] = None,
    top_p: Annotated[float | None, sampling_option("top_p", "Sample from the best of this probability.")] = None,
    min_p: Annotated[
        float | None, sampling_option("min_p", "Drop what is less likely than this part of the best.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, sampling_option("repetition_penalty", "Over prompt and output.")
    ] = None,
    presence_penalty: Annotated[float | None, sampling_option("presence_penalty", "Over the output.")] = None,
    frequency_penalty: Annotated[float | None, sampling_option("frequency_penalty", "Over the output.")] = None,
    logit_bias: Annotated[
        list[str] | None, sampling_option("logit_bias", "Added to a token's logit; repeatable.", metavar="ID=VALUE")
    ] = None,
    seed: Annotated[
        int | None, sampling_option("seed", "Of every prompt's draws, so that a prompt alone repeats its answer.")
    ] = None,
    stop: Annotated[list[str] | None, sampling_option("stop", "End before this text; repeatable.")] = None,
    stop_token_ids: Annotated[
        list[int] | None, sampling_option("stop_token_ids", "End at this id; repeatable.", "--stop-token-id")
    ] = None,
    ignore_eos: Annotated[bool, sampling_option("ignore_eos", "Go on after the end.", "--ignore-eos")] = False,
    include_stop_str_in_output: Annotated[
        bool, sampling_option("include_stop_str_in_output", "Keep the stop text.", "--include-stop-str-in-output")
    ] = False,
    keep_special_tokens: Annotated[
        bool, sampling_option("skip_special_tokens", "Show special tokens too.", "--keep-special-tokens")
    ] = False,
    logprobs: Annotated[int | None, sampling_option("logprobs", "Alternatives per token; -1 is all.")] = None,
    prompt_logprobs: Annotated[
        int | None, sampling_option("prompt_logprobs", "Alternatives per prompt token; -1 is all.")
    ] = None,
    dtype: engine_options.Dtype = None,
    kv_cache_dtype: engine_options.KVCacheDtype = None,
    router_dtype: Annotated[
        str | None, engine_option("router_dtype", f"Of the router's weight: {', '.join(DTYPES)} (auto is dtype).")
    ] = None,
    block_size: engine_options.BlockSize = None,
    max_num_batched_tokens: engine_options.MaxNumBatchedTokens = None,
    max_num_seqs: engine_options.MaxNumSeqs = None,
    max_model_len: engine_options.MaxModelLen = None,
    cache_bytes: Annotated[
        int | None,
        engine_option("cache_bytes", "For KV blocks and states, such as 512MiB.", parser=parse_bytes, metavar="BYTES"),
    ] = None,
    gpu_memory_utilization: engine_options.GpuMemoryUtilization = None,
    no_prefix_caching: engine_options.NoPrefixCaching = False,
    snapshot_bytes: engine_options.SnapshotBytes = None,
    host_snapshot_bytes: engine_options.HostSnapshotBytes = None,
    swap_bytes: engine_options.SwapBytes = None,
    prefill_tokens_per_s: engine_options.PrefillTokensPerS = None,
    host_bytes_per_s: engine_options.HostBytesPerS = None,
    stall_seconds: Annotated[
        float | None, engine_option("stall_seconds", "Without a step for so long, an engine with work is unhealthy.")
    ] = None,
    expanded_bytes: Annotated[
        int | None,
        engine_option(
            "expanded_bytes",
            "For expanded weights of the reference arm; half of the memory where not given.",
            parser=parse_bytes,
            metavar="BYTES",
        ),
    ] = None,
    device: engine_options.Device = None,
    arms: engine_options.Arms = None,
    invariant: engine_options.Invariant = False,
    no_cuda_graphs: engine_options.NoCudaGraphs = False,
    no_overlap: engine_options.NoOverlap = False,
    no_strict: Annotated[
        bool, engine_option("strict", "Allow counted fallbacks to the reference arm.", "--no-strict")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show on stderr where the memory goes.")] = False,
) -> None:
    """Generate text. A single prompt streams; a terminal shows the prompt dim, a pipe gets the answer alone."""
    prompts = read_prompts(prompt or [], prompt_file, prompt_ids)
    if chat and prompt_ids is not None:
        raise RequestError("a chat template needs text", found="--chat with --prompt-ids", expected="text prompts")
    options = ctx.params | {
        "logit_bias": parse_biases(logit_bias or []),
        "skip_special_tokens": not keep_special_tokens,
        "strict": not no_strict,
        "prefix_caching": not no_prefix_caching,
        "cuda_graphs": not no_cuda_graphs,
        "overlap": not no_overlap,
    }
    params = SamplingParams(**given(SamplingParams, options))

    from hemiola.llm import LLM

    llm = LLM(model, revision=revision, **given(EngineConfig, options))
    for note in llm.loaded.notes:
        typer.echo(f"note: {note}", err=True)
    if verbose:
        show_memory(llm.loaded.engine.memory)
    inputs = [_chat_ids(llm, text) for text in prompts] if chat else prompts
    shown = [_shown(text, chat) for text in prompts]
    if len(prompts) == 1 and params.n == 1 and not as_json:
        figures = stream_answer(llm, inputs[0], params, shown[0])
    else:
        start = time.perf_counter()
        outputs = llm.generate(inputs, [params] * len(inputs))
        figures = batch_figures(outputs, time.perf_counter() - start)
        if as_json:
            write_json(outputs)
        else:
            write_answers(llm, outputs, shown)
    typer.echo(f"{figures}; {run_figures(llm)}", err=True)


def _chat_ids(llm: LLM, text: Prompt) -> Sequence[int]:
    """A user's message as the ids of a chat prompt. Raises: RequestError without a tokenizer or a template."""
    tokenizer = llm.loaded.tokenizer
    if tokenizer is None:
        raise RequestError("chat needs a tokenizer, and this model has none")
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": text}])
    return tokenizer.encode(rendered, add_special_tokens=False)


def _shown(prompt: Prompt, is_chat: bool) -> str | None:
    """What a terminal shows before an answer; nothing for ids."""
    if not isinstance(prompt, str):
        return None
    return prompt + "\n" if is_chat else prompt
