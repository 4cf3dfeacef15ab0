"""Paged attention on the device: bfloat16 activations over a bfloat16 or e4m3 cache."""

from __future__ import annotations

from typing import Any

import torch

from hemiola.kernels.attention_decode import attention_decode
from hemiola.kernels.attention_prefill import attention_prefill
from hemiola.kernels.launch import capability
from hemiola.ops.layout import PrefillLayout
from hemiola.ops.table import register

_LARGEST_HEAD = 256
_LARGEST_GROUP = 64


def unsupported(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *args: Any, **kwargs: Any) -> str | None:
    if q.dtype != torch.bfloat16:
        return f"activations are {q.dtype}: the device arm computes in bfloat16"
    if k_cache.dtype not in {torch.bfloat16, torch.float8_e4m3fn}:
        return f"the KV cache is {k_cache.dtype}, neither bfloat16 nor float8_e4m3fn"
    if k_cache.dtype == torch.float8_e4m3fn and 0 < capability() < 89:
        return "e4m3 conversions need compute capability 8.9"
    block_size, kv_heads, head_dim = k_cache.shape[1:]
    if block_size & (block_size - 1):
        return f"a block of {block_size} tokens is no power of two"
    if head_dim % 2 or head_dim > _LARGEST_HEAD:
        return f"a head of {head_dim} is odd or above {_LARGEST_HEAD}"
    if q.shape[1] // kv_heads > _LARGEST_GROUP:
        return f"{q.shape[1] // kv_heads} query heads share a KV head, more than {_LARGEST_GROUP}"
    return None


def paged_attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    k_scale: float,
    v_scale: float,
    *,
    invariant: bool,
) -> torch.Tensor:
    return attention_decode(q, k_cache, v_cache, block_table, seq_lens, scale, k_scale, v_scale, invariant=invariant)


def paged_attention_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    k_scale: float,
    v_scale: float,
    layout: PrefillLayout | None = None,
) -> torch.Tensor:
    """A row's bits depend on the row alone in any case."""
    longest = int(query_start_loc.diff().max()) if layout is None else layout.max_query_len
    return attention_prefill(
        q, k_cache, v_cache, block_table, query_start_loc, seq_lens, scale, k_scale, v_scale, longest
    )


register(
    op="paged_attention_decode",
    arm="device",
    variant="triton",
    run=paged_attention_decode,
    unsupported=unsupported,
    invariant=True,
)
register(
    op="paged_attention_prefill",
    arm="device",
    variant="triton",
    run=paged_attention_prefill,
    unsupported=unsupported,
)
