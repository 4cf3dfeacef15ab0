"""Depthwise causal convolution with SiLU over the mixer's x, B and C channels, and its rolling state.

Two ops with one arithmetic: `causal_conv1d` takes any number of tokens per request, `causal_conv1d_update` exactly one.

x: (T, Dc) activation dtype, raw in_proj output, requests one after the other.
weight: (Dc, K), bias: (Dc,) or None, both in the activation dtype; tap K-1 multiplies the current token.
conv_state: (slots, Dc, K-1) activation dtype, the last K-1 raw inputs, oldest first; updated in place.
state_indices: (R,) int32, the request's slot, or -1 for a padded row, which reads and writes no state and returns
zeros.
query_start_loc: (R + 1,) int32; has_initial_state: (R,) bool, False where the history is zero whatever the slot holds.
Returns (T, Dc) in the activation dtype.
Numerics: each tap's product is rounded to the activation dtype, then added to a float32 accumulator that starts from
the bias, oldest tap first; SiLU in float32; one rounding.
Source: vLLM 0.25.0 layers/mamba/ops/causal_conv1d.py.
"""

from __future__ import annotations

import torch

from hemiola.ops.table import register


def _convolve(window: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """window: (..., Dc, K-1+n) raw inputs, oldest first. Returns silu of the n outputs, (..., Dc, n) float32."""
    width = weight.shape[1]
    n = window.shape[-1] - width + 1
    total: torch.Tensor | float = 0.0 if bias is None else bias.float()[:, None]
    for tap in range(width):
        total = total + (window[..., tap : tap + n] * weight[:, tap : tap + 1]).float()
    assert isinstance(total, torch.Tensor), "a convolution has at least one tap"
    return torch.nn.functional.silu(total)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    state_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    has_initial_state: torch.Tensor,
) -> torch.Tensor:
    out = torch.zeros_like(x)
    starts = query_start_loc.tolist()
    rows = zip(starts, starts[1:], state_indices.tolist(), has_initial_state.tolist(), strict=False)
    for start, end, slot, has_initial in rows:
        if slot < 0 or start == end:
            continue
        history = conv_state[slot] if has_initial else torch.zeros_like(conv_state[slot])
        window = torch.cat([history, x[start:end].T], dim=1)
        out[start:end] = _convolve(window, weight, bias).to(x.dtype).T
        conv_state[slot] = window[:, window.shape[1] - history.shape[1] :]
    return out


def causal_conv1d_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    state_indices: torch.Tensor,
) -> torch.Tensor:
    if state_indices.min() < 0:
        out = torch.zeros_like(x)
        live = (state_indices >= 0).nonzero().squeeze(1)
        out[live] = causal_conv1d_update(x[live], weight, bias, conv_state, state_indices[live]) if len(live) else x[:0]
        return out
    window = torch.cat([conv_state[state_indices], x[..., None]], dim=2)
    conv_state[state_indices] = window[..., 1:]
    return _convolve(window, weight, bias).squeeze(-1).to(x.dtype)


register(op="causal_conv1d", arm="reference", variant="torch", run=causal_conv1d, mutates=("conv_state",))
register(op="causal_conv1d_update", arm="reference", variant="torch", run=causal_conv1d_update, mutates=("conv_state",))
