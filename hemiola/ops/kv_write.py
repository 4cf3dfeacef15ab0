"""Writes a step's keys and values into the paged KV cache.

k, v: (T, Hkv, D) activation dtype; k_cache, v_cache: (blocks, block_size, Hkv, D), activation dtype or float8_e4m3fn,
written in place; slot_mapping: (T,) int64, block * block_size + offset, or -1 for a padded row, which writes nothing.
k_scale, v_scale: with an fp8 cache the stored code is e4m3(k / k_scale), saturating; unused otherwise.
"""

from __future__ import annotations

import torch

from hemiola.formats.quant import fp8
from hemiola.ops.table import register


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    if slot_mapping.min() < 0:
        live = (slot_mapping >= 0).nonzero().squeeze(1)
        k, v, slot_mapping = k[live], v[live], slot_mapping[live]
    for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        flat = cache.view(-1, *cache.shape[2:])
        if cache.dtype == torch.float8_e4m3fn:
            flat.view(torch.uint8)[slot_mapping] = fp8.quantize(new.float(), scale).view(torch.uint8)
        else:
            flat[slot_mapping] = new


register(op="kv_write", arm="reference", variant="torch", run=kv_write, mutates=("k_cache", "v_cache"))
