"""KV write on the device: bfloat16 keys and values into a bfloat16 or e4m3 cache."""

from __future__ import annotations

from typing import Any

import torch

from hemiola.kernels.kv_write import kv_write
from hemiola.kernels.launch import capability
from hemiola.ops.table import register


def unsupported(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, *args: Any, **kwargs: Any) -> str | None:
    if k.dtype != torch.bfloat16:
        return f"activations are {k.dtype}: the device arm computes in bfloat16"
    if k_cache.dtype not in {torch.bfloat16, torch.float8_e4m3fn}:
        return f"the KV cache is {k_cache.dtype}, neither bfloat16 nor float8_e4m3fn"
    if k_cache.dtype == torch.float8_e4m3fn and 0 < capability() < 89:
        return "e4m3 conversions need compute capability 8.9"
    return None


register(
    op="kv_write",
    arm="device",
    variant="triton",
    run=kv_write,
    unsupported=unsupported,
    mutates=("k_cache", "v_cache"),
)
