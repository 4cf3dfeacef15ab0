"""rms_norm on the device: hemiola.kernels.rms_norm."""

from __future__ import annotations

import torch

from hemiola.kernels.launch import capability
from hemiola.kernels.rms_norm import rms_norm
from hemiola.ops.table import register


def unsupported(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out_scale: float | None = None,
) -> str | None:
    if x.dtype != torch.bfloat16:
        return f"activations are {str(x.dtype).removeprefix('torch.')}: the device arm computes in bfloat16"
    if out_scale is not None and 0 < capability() < 89:
        return "this GPU has no conversion to e4m3: it needs compute capability 8.9"
    return None


register(op="rms_norm", arm="device", variant="triton", run=rms_norm, unsupported=unsupported)
