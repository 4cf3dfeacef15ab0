"""ssd_update on the device: hemiola.kernels.ssd_update."""

from __future__ import annotations

from typing import Any

import torch

from hemiola.kernels.ssd_update import ssd_update
from hemiola.ops.table import register


def unsupported(x: torch.Tensor, *_: Any) -> str | None:
    if x.dtype != torch.bfloat16:
        return f"activations are {str(x.dtype).removeprefix('torch.')}: the device arm computes in bfloat16"
    return None


register(
    op="ssd_update", arm="device", variant="triton", run=ssd_update, unsupported=unsupported, mutates=("ssm_state",)
)
