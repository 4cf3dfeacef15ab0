"""The norm before a mixture-of-experts layer, and its router, in one: `rms_norm`, then `moe_route` of what it gives.

x, residual, norm_weight, eps: as `rms_norm` takes them; the other arguments as `moe_route` does.
Returns (ids, weights, logits, y, s): what `moe_route` returns, then what `rms_norm` does.
Numerics: as of the two; a device gives the bits that it gives one after the other.
Source: as of the two.
"""

from __future__ import annotations

import torch

from hemiola.formats.weight import Weight
from hemiola.ops.kept import KeptForms
from hemiola.ops.moe_route import moe_route
from hemiola.ops.rms_norm import rms_norm
from hemiola.ops.table import register


def norm_route(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    gate: Weight,
    gate_dtype: torch.dtype,
    correction_bias: torch.Tensor,
    top_k: int,
    router_groups: int,
    topk_router_groups: int,
    normalise: bool,
    *,
    kept: KeptForms,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    y, total = rms_norm(x, residual, norm_weight, eps)
    choice = (top_k, router_groups, topk_router_groups, normalise)
    return *moe_route(y, gate, gate_dtype, correction_bias, *choice, kept=kept), y, total


register(op="norm_route", arm="reference", variant="torch", run=norm_route, keeps=True)
