"""gated_rms_norm on the device: hemiola.kernels.gated_rms_norm."""

from __future__ import annotations

import torch

from hemiola.kernels.gated_rms_norm import gated_rms_norm
from hemiola.kernels.launch import capability
from hemiola.ops.table import register


def unsupported(
    y: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    group_size: int,
    eps: float,
    out_scale: float | None = None,
) -> str | None:
    if y.dtype != torch.bfloat16:
        return f"activations are {str(y.dtype).removeprefix('torch.')}: the device arm computes in bfloat16"
    if out_scale is not None and 0 < capability() < 89:
        return "this GPU has no conversion to e4m3: it needs compute capability 8.9"
    return None


register(op="gated_rms_norm", arm="device", variant="triton", run=gated_rms_norm, unsupported=unsupported)
