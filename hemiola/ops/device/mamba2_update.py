"""mamba2_update on the device: one launch of clusters of blocks, hemiola.kernels.mamba2_update, or three launches."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hemiola.kernels import mamba2_update as kernel
from hemiola.kernels.causal_conv1d import causal_conv1d_update
from hemiola.kernels.gated_rms_norm import gated_rms_norm
from hemiola.kernels.launch import capability
from hemiola.kernels.ssd_update import ssd_update
from hemiola.ops.mamba2_update import split
from hemiola.ops.table import register


def unsupported(
    z: Tensor,
    xBC: Tensor,
    dt: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    A: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    state_indices: Tensor,
    norm_weight: Tensor,
    group_size: int,
    eps: float,
    dt_limit: tuple[float, float],
    out_scale: float | None = None,
    *,
    in_one: bool = False,
) -> str | None:
    if z.dtype != torch.bfloat16:
        return f"activations are {str(z.dtype).removeprefix('torch.')}: the device arm computes in bfloat16"
    if in_one:
        return kernel.unsupported(z, conv_weight, ssm_state, state_indices, z.shape[1] // group_size)
    if out_scale is not None and 0 < capability() < 89:
        return "this GPU has no conversion to e4m3: it needs compute capability 8.9"
    return None


unsupported_in_one = partial(unsupported, in_one=True)


def in_three(
    z: Tensor,
    xBC: Tensor,
    dt: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    A: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    state_indices: Tensor,
    norm_weight: Tensor,
    group_size: int,
    eps: float,
    dt_limit: tuple[float, float],
    out_scale: float | None = None,
) -> Tensor:
    convolved = causal_conv1d_update(xBC, conv_weight, conv_bias, conv_state, state_indices)
    x, B, C = split(convolved, ssm_state, group_size)
    y = ssd_update(x, dt, A, B, C, D, dt_bias, ssm_state, state_indices, dt_limit)
    return gated_rms_norm(y.flatten(1), z, norm_weight, group_size, eps, out_scale)


register(
    op="mamba2_update",
    arm="device",
    variant="cuda",
    run=kernel.mamba2_update,
    unsupported=unsupported_in_one,
    mutates=("conv_state", "ssm_state"),
)
register(
    op="mamba2_update",
    arm="device",
    variant="triton",
    run=in_three,
    unsupported=unsupported,
    mutates=("conv_state", "ssm_state"),
)
