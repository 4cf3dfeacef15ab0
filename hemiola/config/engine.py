"""EngineConfig: every setting of an engine, with its one default. The only module that reads the machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from hemiola.errors import ConfigError

DTYPES = ("auto", "float32", "bf16")
KV_CACHE_DTYPES = ("auto", "model", "fp8")


def _half_of_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


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
    cache_bytes: for KV blocks and state slots together. expanded_bytes: for the reference arm's expanded weights.
    arms: the arm of every op, or op names to arms (others run on the reference arm). strict: no counted fallbacks.
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
    expanded_bytes: int = field(default_factory=_half_of_memory)
    arms: str | Mapping[str, str] = "reference"
    strict: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name, accepted in (("dtype", DTYPES), ("router_dtype", DTYPES), ("kv_cache_dtype", KV_CACHE_DTYPES)):
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
        if self.expanded_bytes < 0:
            raise ConfigError("negative budget", found=self.expanded_bytes, expected=">= 0", where="expanded_bytes")
