"""Mamba-2 update: what exactly one token per request needs between in_proj and out_proj.

The convolution's step, the step of the state, the gated group norm: `causal_conv1d_update`, `ssd_update` and
`gated_rms_norm`, one after the other.

z: (R, Di), xBC: (R, Dc), dt: (R, H): in_proj's output, in the activation dtype. xBC is [x, B, C]: Di = H P channels of
x, G N of B and as many of C.
conv_weight: (Dc, K), conv_bias: (Dc,) or None, norm_weight: (Di,): activation dtype; A, D, dt_bias: (H,) float32.
conv_state: (slots, Dc, K-1) activation dtype, ssm_state: (slots, H, P, N) float32; updated in place.
state_indices: (R,) int32, the request's slot, distinct, or -1 for a padded row, whose z is finite: it reads and writes
no state and returns zeros.
group_size: Di / G, channels of the norm's group. dt_limit, out_scale: as in `ssd_update` and `gated_rms_norm`.
What the states and the slots hold has to be older than the two launches before this one, which are in_proj's and what
gives in_proj its input: a device reads the states while in_proj still runs.
Returns (R, Di) in the activation dtype, or float8_e4m3fn with out_scale.
Numerics: as of the three, with their roundings: of each tap's product, x, B, C, y and the normalised value.
Source: as of the three.
"""

from __future__ import annotations

import torch

from hemiola.ops.causal_conv1d import causal_conv1d_update
from hemiola.ops.gated_rms_norm import gated_rms_norm
from hemiola.ops.ssd_update import ssd_update
from hemiola.ops.table import register


def mamba2_update(
    z: torch.Tensor,
    xBC: torch.Tensor,
    dt: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    ssm_state: torch.Tensor,
    state_indices: torch.Tensor,
    norm_weight: torch.Tensor,
    group_size: int,
    eps: float,
    dt_limit: tuple[float, float],
    out_scale: float | None = None,
) -> torch.Tensor:
    convolved = causal_conv1d_update(xBC, conv_weight, conv_bias, conv_state, state_indices)
    x, B, C = split(convolved, ssm_state, group_size)
    y = ssd_update(x, dt, A, B, C, D, dt_bias, ssm_state, state_indices, dt_limit)
    return gated_rms_norm(y.flatten(1), z, norm_weight, group_size, eps, out_scale)


def split(
    convolved: torch.Tensor, ssm_state: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(R, Dc) -> x (R, H, P), B and C (R, G, N)."""
    _, heads, head_dim, state_size = ssm_state.shape
    inner = heads * head_dim
    groups = inner // group_size
    x, B, C = convolved.split_with_sizes([inner, groups * state_size, groups * state_size], dim=-1)
    return x.view(-1, heads, head_dim), B.view(-1, groups, state_size), C.view(-1, groups, state_size)


register(
    op="mamba2_update",
    arm="reference",
    variant="torch",
    run=mamba2_update,
    mutates=("conv_state", "ssm_state"),
)
