"""EngineConfig: every setting of an engine, with its one default. The only module that reads the machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hemiola.errors import ConfigError

OTHERS = "*"  # in `arms`, in place of an op's name: all ops that are not named
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bf16")
KV_CACHE_DTYPES = ("auto", "model", "fp8")


def _half_of_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def available_memory() -> int:
    """Bytes that new allocations can take without swapping, as the system estimates it (page cache counts as free)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine.

    dtype: numeric mode; "auto" is float32 for a float32 checkpoint, else bf16, which rounds where vLLM rounds.
    kv_cache_dtype: "auto" follows the checkpoint (fp8 when it declares fp8 KV or stores k_scale/v_scale), "model" is
        the activation dtype.
    router_dtype: what the router's gate weight is rounded to; "auto" follows dtype (bf16 is what vLLM does on Hopper).
    block_size: tokens per KV block. max_num_batched_tokens: tokens per step. max_num_seqs: requests running at once;
        clamped to the state slots that fit. max_model_len: tokens of prompt and output together; None is the model's
        max_position_embeddings.
    cache_bytes: for KV blocks and state slots together; clamped to the memory that is available.
    gpu_memory_utilization: as in vLLM, the part of a GPU's memory that weights, caches, snapshots, workspace and graphs
        may take together with what others hold there already. cache_bytes then follows from it. None: cache_bytes says.
    expanded_bytes: for the reference arm's expanded weights.
    prefix_caching: reuse beginnings of prompts. On by default: an entry is found by a 128-bit hash of all its tokens,
        and only after the step that wrote it, so a hit reads what the same tokens wrote; and what is computed without a
        hit is bit for bit what it is without caching. Its price is snapshot_bytes, and a step more for long prompts.
    snapshot_bytes: for state snapshots, beyond cache_bytes; None is a quarter of cache_bytes, but not more than 8
        snapshots for each of max_num_seqs. host_snapshot_bytes: of host memory, for snapshots that those displace.
    swap_bytes: of host memory, for requests that had to make room for others.
    prefill_tokens_per_s, host_bytes_per_s: what the choice between computing again and swapping assumes. The defaults
        are planning figures (a 30B model on one recent GPU, a PCIe 5 host link), not measurements of this machine.
    stall_seconds: an engine with work that completes no step for so long is unhealthy.
    device: "auto" is the first GPU where some op is on the device arm, else the CPU.
    arms: the arm of every op, or op names to arms; ops that are not named run on the arm of "*", or else on the
        reference arm. "auto" is the device arm where there is a GPU that can run it, else the reference arm. strict: no
        counted fallbacks.
    invariant: on the device arm, a request's greedy tokens do not depend on what runs beside it.
    cuda_graphs: replay steps of decodes as CUDA graphs. overlap: launch a step before the ids of the one before it have
        reached the host. Both are for a GPU.
    seed: base of the seeds of requests that bring none.
    """

    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    router_dtype: str = "auto"
    block_size: int = 16
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 16
    max_model_len: int | None = None
    cache_bytes: int = 2 << 30
    gpu_memory_utilization: float | None = None
    expanded_bytes: int = field(default_factory=_half_of_memory)
    prefix_caching: bool = True
    snapshot_bytes: int | None = None
    host_snapshot_bytes: int = 0
    swap_bytes: int = 1 << 30
    prefill_tokens_per_s: float = 10_000.0
    host_bytes_per_s: float = 25e9
    stall_seconds: float = 60.0
    device: str = "auto"
    arms: str | Mapping[str, str] = "auto"
    strict: bool = True
    invariant: bool = False
    cuda_graphs: bool = True
    overlap: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name, accepted in (
            ("device", DEVICES),
            ("dtype", DTYPES),
            ("router_dtype", DTYPES),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
        ):
            if getattr(self, name) not in accepted:
                raise ConfigError(
                    "unknown value",
                    found=repr(getattr(self, name)),
                    expected=f"one of {', '.join(accepted)}",
                    where=name,
                )
        for name in ("block_size", "max_num_batched_tokens", "max_num_seqs", "max_model_len", "cache_bytes"):
            value = getattr(self, name)
            if value is None and name == "max_model_len":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError("not a positive count", found=repr(value), expected="an integer >= 1", where=name)
        for name in ("expanded_bytes", "snapshot_bytes", "host_snapshot_bytes", "swap_bytes"):
            budget = getattr(self, name)
            if budget is not None and budget < 0:
                raise ConfigError("negative budget", found=budget, expected=">= 0", where=name)
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ConfigError(
                "not a part of the memory", found=share, expected="above 0, at most 1", where="gpu_memory_utilization"
            )
        for name in ("prefill_tokens_per_s", "host_bytes_per_s", "stall_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError("not positive", found=getattr(self, name), expected="> 0", where=name)
