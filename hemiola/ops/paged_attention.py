"""Causal attention over the paged KV cache, after the step's own keys and values were written into it.

q: (T, Hq, D) activation dtype, requests one after the other; query head j reads KV head j // (Hq/Hkv).
k_cache, v_cache: (blocks, block_size, Hkv, D), activation dtype or float8_e4m3fn (then multiplied by k_scale, v_scale).
block_table: (R, max_blocks) int32; query_start_loc: (R + 1,) int32; seq_lens: (R,) int32, tokens of the request
including this step's; 0 for a padded row, which returns zeros. layout: of the same rows, for a device (see
`hemiola.ops.layout`).
Returns (T, Hq, D) in the activation dtype. No positional encoding exists in this family.
Numerics: scores and softmax in float32; the unnormalised weights exp(score - largest) are rounded to the activation
dtype where they enter the product with the values, as in FlashAttention; their sum is not; one rounding of the result.

`paged_attention_decode` is the same op for exactly one token per request (no query_start_loc).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hemiola.ops.layout import PrefillLayout
from hemiola.ops.table import register

_QUERY_TILE = 128  # bounds the scores held at once


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
    starts = query_start_loc.tolist()
    return _attend_rows(q, k_cache, v_cache, block_table, starts, seq_lens, scale, k_scale, v_scale)


def paged_attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    k_scale: float,
    v_scale: float,
) -> torch.Tensor:
    starts = range(q.shape[0] + 1)
    return _attend_rows(q, k_cache, v_cache, block_table, starts, seq_lens, scale, k_scale, v_scale)


def _attend_rows(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    starts: Sequence[int],
    seq_lens: torch.Tensor,
    scale: float,
    k_scale: float,
    v_scale: float,
) -> torch.Tensor:
    out = torch.zeros_like(q)
    for row, (start, end, length) in enumerate(zip(starts, starts[1:], seq_lens.tolist(), strict=False)):
        if length == 0 or start == end:
            continue
        keys = _gather(k_cache, block_table[row], length, k_scale)
        values = _gather(v_cache, block_table[row], length, v_scale)
        _attend(q[start:end], keys, values, scale, out[start:end])
    return out


def _gather(cache: torch.Tensor, blocks: torch.Tensor, length: int, scale: float) -> torch.Tensor:
    """The first `length` cached tokens of one request, (Hkv, length, D) float32."""
    block_size = cache.shape[1]
    used = blocks[: -(-length // block_size)]
    if cache.dtype == torch.float8_e4m3fn:
        tokens = cache.view(torch.uint8).index_select(0, used).view(cache.dtype).float() * scale
    else:
        tokens = cache.index_select(0, used).float()
    return tokens.flatten(0, 1)[:length].transpose(0, 1)


def _attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """q: (n, Hq, D), the last n tokens of the request; keys, values: (Hkv, length, D) float32; out: as q, written."""
    n, num_heads, head_dim = q.shape
    kv_heads, length, _ = keys.shape
    queries = q.float().view(n, kv_heads, -1, head_dim).permute(1, 2, 0, 3)  # (Hkv, heads per KV head, n, D)
    for low in range(0, n, _QUERY_TILE):
        high = min(low + _QUERY_TILE, n)
        tile, seen = high - low, length - n + high  # keys that this tile's last query may look at
        rows = queries[:, :, low:high].reshape(kv_heads, -1, head_dim)
        scores = (rows @ keys[:, :seen].transpose(1, 2)).mul_(scale)
        if tile > 1:
            future = torch.ones(tile, tile, dtype=torch.bool, device=q.device).triu(1)
            scores.view(kv_heads, -1, tile, seen)[..., seen - tile :].masked_fill_(future, -torch.inf)
        weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
        mixed = weights.to(q.dtype).float() @ values[:, :seen] / weights.sum(-1, keepdim=True)
        out[low:high] = mixed.view(num_heads, tile, head_dim).transpose(0, 1)


register(op="paged_attention_prefill", arm="reference", variant="torch", run=paged_attention_prefill)
register(op="paged_attention_decode", arm="reference", variant="torch", run=paged_attention_decode)
