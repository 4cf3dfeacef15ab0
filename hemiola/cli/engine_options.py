"""Options that several commands have, declared once: the engine's, as annotations for parameters of their fields'
names, and where to record."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hemiola.cli.settings import engine_option, parse_arms, parse_bytes
from hemiola.config.engine import DEVICES, DTYPES, KV_CACHE_DTYPES

Dtype = Annotated[
    str | None, engine_option("dtype", f"Numeric mode: {', '.join(DTYPES)} (auto follows the checkpoint).")
]
KVCacheDtype = Annotated[
    str | None, engine_option("kv_cache_dtype", f"{', '.join(KV_CACHE_DTYPES)} (auto follows the checkpoint).")
]
BlockSize = Annotated[int | None, engine_option("block_size", "Tokens per KV block.")]
MaxNumBatchedTokens = Annotated[int | None, engine_option("max_num_batched_tokens", "Tokens per step.")]
MaxNumSeqs = Annotated[int | None, engine_option("max_num_seqs", "Requests that run together.")]
MaxModelLen = Annotated[
    int | None, engine_option("max_model_len", "Tokens of prompt and output; the model's own where not given.")
]
NoPrefixCaching = Annotated[
    bool, engine_option("prefix_caching", "Compute every prompt from its beginning.", "--no-prefix-caching")
]
GpuMemoryUtilization = Annotated[
    float | None,
    engine_option("gpu_memory_utilization", "Part of a GPU's memory to fill, 0.9 say, instead of --cache-bytes."),
]
SnapshotBytes = Annotated[
    int | None,
    engine_option(
        "snapshot_bytes",
        "For state snapshots, beyond cache_bytes; a quarter of it where not given.",
        parser=parse_bytes,
        metavar="BYTES",
    ),
]
HostSnapshotBytes = Annotated[
    int | None,
    engine_option(
        "host_snapshot_bytes", "Host memory for snapshots that give way.", parser=parse_bytes, metavar="BYTES"
    ),
]
SwapBytes = Annotated[
    int | None,
    engine_option("swap_bytes", "Host memory for requests that give way.", parser=parse_bytes, metavar="BYTES"),
]
PrefillTokensPerS = Annotated[
    float | None,
    engine_option("prefill_tokens_per_s", "Assumed speed, to choose between computing again and swapping."),
]
HostBytesPerS = Annotated[
    float | None, engine_option("host_bytes_per_s", "Assumed speed to and from host memory, for the same choice.")
]
Device = Annotated[str | None, engine_option("device", f"{', '.join(DEVICES)} (auto follows the arms).")]
Arms = Annotated[
    str | None,
    engine_option(
        "arms",
        "Arm of every op (auto, reference, device), or OP=ARM,... for single ops; a bare arm before them is for the "
        "others: device,linear=reference.",
        parser=parse_arms,
        metavar="ARMS",
    ),
]
Invariant = Annotated[
    bool,
    engine_option("invariant", "On a GPU, tokens that do not depend on what runs beside them.", "--invariant"),
]
NoCudaGraphs = Annotated[bool, engine_option("cuda_graphs", "On a GPU, launch every kernel.", "--no-cuda-graphs")]
NoOverlap = Annotated[
    bool, engine_option("overlap", "On a GPU, wait for a step's ids before the next one.", "--no-overlap")
]
RecordFolder = Annotated[
    Path | None,
    typer.Option("--record", metavar="FOLDER", help="Add the result to the records there, for `hemiola report`."),
]
