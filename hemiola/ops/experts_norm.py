"""Routed experts, and the norm that comes after their layer, in one: `moe_experts`, then `rms_norm` of what it gives.

experts: a tuple of what `moe_experts` takes by position. residual: (T, hidden), what the layer's output is added to;
norm_weight, eps, out_scale: as `rms_norm` takes them, of the layer behind.
Returns (y, s): what `rms_norm` does.
Numerics: as of the two; a device gives the bits that it gives one after the other.
Source: as of the two.
"""

from __future__ import annotations

from typing import Any

import torch

from hemiola.ops.kept import KeptForms
from hemiola.ops.moe_experts import moe_experts
from hemiola.ops.rms_norm import rms_norm
from hemiola.ops.table import register


def experts_norm(
    experts: tuple[Any, ...],
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    out_scale: float | None = None,
    *,
    kept: KeptForms,
) -> tuple[torch.Tensor, torch.Tensor]:
    return rms_norm(moe_experts(*experts, kept=kept), residual, norm_weight, eps, out_scale)


register(op="experts_norm", arm="reference", variant="torch", run=experts_norm, keeps=True)
