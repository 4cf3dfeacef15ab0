"""SSD update: the Mamba-2 state recurrence for exactly one token per request, a part of the op `mamba2_update`.

    dt = clamp(softplus(dt + dt_bias));  S <- exp(A dt) S + (B dt) x;  y = S C + D x

x: (R, H, P); dt: (R, H) raw; B, C: (R, G, N); all in the activation dtype. Head h reads group h // (H/G).
A, D, dt_bias: (H,) float32, A = -exp(A_log).
ssm_state: (slots, H, P, N) float32, updated in place; state_indices: (R,) int32, -1 for a padded row, which reads and
writes no state and returns zeros.
dt_limit: (low, high) clamp of dt after softplus; (0, inf) in every public checkpoint.
Returns y (R, H, P) in the activation dtype.
Numerics: everything float32 with the unrounded new state; y is rounded once.
Source: Mamba-2 paper (arXiv 2405.21060) section 3; vLLM 0.25.0 layers/mamba/ops/mamba_ssm.py.
"""

from __future__ import annotations

import math

import torch


def ssd_update(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    ssm_state: torch.Tensor,
    state_indices: torch.Tensor,
    dt_limit: tuple[float, float],
) -> torch.Tensor:
    slots = state_indices.tolist()
    if min(slots) < 0:
        y = torch.zeros_like(x)
        live = (state_indices >= 0).nonzero().squeeze(1)
        if len(live):
            part = (x[live], dt[live], A, B[live], C[live], D, dt_bias, ssm_state, state_indices[live], dt_limit)
            y[live] = ssd_update(*part)
        return y
    num_rows, num_heads, head_dim = x.shape
    groups, state_size = B.shape[1:]
    step = torch.nn.functional.softplus(dt.float() + dt_bias)
    if dt_limit != (0.0, math.inf):
        step = step.clamp(*dt_limit)
    decay = torch.exp(A * step)[..., None, None]
    scaled_b = B.float()[:, :, None] * step.view(num_rows, groups, -1, 1)
    wide_x = x.float()
    # Slots in a row, as they mostly are, are updated where they lie.
    is_run = slots == list(range(slots[0], slots[0] + num_rows))
    state = ssm_state[slots[0] : slots[0] + num_rows] if is_run else ssm_state.index_select(0, state_indices)
    state *= decay
    state += wide_x[..., None] * scaled_b.view(num_rows, num_heads, 1, state_size)
    if not is_run:
        ssm_state[state_indices] = state
    by_group = state.view(num_rows, groups, -1, state_size)
    y = (C.float()[:, :, None] @ by_group.transpose(2, 3)).view(num_rows, num_heads, head_dim)
    return (y + wide_x * D[:, None]).to(x.dtype)
