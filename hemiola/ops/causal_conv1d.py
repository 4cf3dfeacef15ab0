"""Depthwise causal convolution with SiLU over the mixer's x, B and C channels, and its rolling state.

`causal_conv1d` takes any number of tokens per request. `causal_conv1d_update`, a part of the op `mamba2_update`, takes
exactly one with the same arithmetic.

x: (T, Dc) activation dtype, raw in_proj output, requests one after the other.
weight: (Dc, K), bias: (Dc,) or None, both in the activation dtype; tap K-1 multiplies the current token.
conv_state: (slots, Dc, K-1) activation dtype, the last K-1 raw inputs, oldest first; updated in place.
state_indices: (R,) int32, the request's slot, or -1 for a padded row, which reads and writes no state and returns
zeros.
query_start_loc: (R + 1,) int32; has_initial_state: (R,) bool, False where the history is zero whatever the slot holds.
layout: of the same rows, for a device (see `hemiola.ops.layout`).
Returns (T, Dc) in the activation dtype.
Numerics: each tap's product is rounded to the activation dtype, then added to a float32 accumulator that starts from
the bias, oldest tap first; SiLU in float32; one rounding.
Source: vLLM 0.25.0 layers/mamba/ops/causal_conv1d.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hemiola.ops.layout import PrefillLayout
from hemiola.ops.table import register


def _activated(products: Iterable[torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
    """silu of bias plus products, oldest tap first, each (n, Dc) in the activation dtype; float32."""
    first, *others = products
    total = first.float() + (0.0 if bias is None else bias.float())
    for product in others:
        total += product
    return torch.nn.functional.silu(total, inplace=True)


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
    out = torch.zeros_like(x)
    taps = weight.T.contiguous()
    starts = query_start_loc.tolist()
    rows = zip(starts, starts[1:], state_indices.tolist(), has_initial_state.tolist(), strict=False)
    for start, end, slot, has_initial in rows:
        if slot < 0 or start == end:
            continue
        history = conv_state[slot].T if has_initial else x.new_zeros(conv_state.shape[2], x.shape[1])
        window = torch.cat([history, x[start:end]])
        products = (window[tap : tap + end - start] * taps[tap] for tap in range(len(taps)))
        out[start:end] = _activated(products, bias)
        conv_state[slot] = window[len(window) - len(history) :].T
    return out


def causal_conv1d_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    state_indices: torch.Tensor,
) -> torch.Tensor:
    slots = state_indices.tolist()
    if min(slots) < 0:
        out = torch.zeros_like(x)
        live = (state_indices >= 0).nonzero().squeeze(1)
        out[live] = causal_conv1d_update(x[live], weight, bias, conv_state, state_indices[live]) if len(live) else x[:0]
        return out
    # Slots in a row, as they mostly are, are updated where they lie.
    is_run = slots == list(range(slots[0], slots[0] + len(slots)))
    state = conv_state[slots[0] : slots[0] + len(slots)] if is_run else conv_state.index_select(0, state_indices)
    window = torch.cat([state, x[..., None]], dim=2)
    state.copy_(window[..., 1:])
    if not is_run:
        conv_state[state_indices] = state
    return _activated((window * weight).unbind(-1), bias).to(x.dtype)


register(op="causal_conv1d", arm="reference", variant="torch", run=causal_conv1d, mutates=("conv_state",))
