"""causal_conv1d on the device: hemiola.kernels.causal_conv1d."""

from __future__ import annotations

from typing import Any

import torch

from hemiola.kernels import causal_conv1d as kernels
from hemiola.ops.layout import PrefillLayout
from hemiola.ops.table import register


def unsupported(x: torch.Tensor, *_: Any) -> str | None:
    if x.dtype != torch.bfloat16:
        return f"activations are {str(x.dtype).removeprefix('torch.')}: the device arm computes in bfloat16"
    return None


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    state_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    has_initial_state: torch.Tensor,
    layout: PrefillLayout | None = None,
) -> torch.Tensor:
    if layout is None:
        lengths = query_start_loc.diff()
        token_rows = torch.arange(len(lengths), dtype=torch.int32, device=x.device).repeat_interleave(lengths)
    else:
        token_rows = layout.token_rows
    return kernels.causal_conv1d(
        x, weight, bias, conv_state, state_indices, query_start_loc, has_initial_state, token_rows
    )


register(
    op="causal_conv1d",
    arm="device",
    variant="triton",
    run=causal_conv1d,
    unsupported=unsupported,
    mutates=("conv_state",),
)
