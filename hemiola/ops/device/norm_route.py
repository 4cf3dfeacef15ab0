"""norm_route on the device: `kernels.router` with the norm in every block, for very few tokens.

For more, and where that cannot run, there is no variant: the two ops run one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hemiola.formats.weight import Weight
from hemiola.kernels import router
from hemiola.ops.device import moe_route
from hemiola.ops.resident import ResidentWeights
from hemiola.ops.table import register


def unsupported(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    gate: Weight,
    gate_dtype: torch.dtype,
    correction_bias: Tensor,
    top_k: int,
    *choice: int | bool,
) -> str | None:
    if len(x) not in router.NORM_TOKENS:
        return f"{len(x)} tokens are not one of {', '.join(map(str, router.NORM_TOKENS))}"
    if gate_dtype != torch.bfloat16:
        return f"the gate is {gate_dtype}, not bfloat16"
    if not router.takes_norm(x, residual, norm_weight, gate.shape[0], top_k):
        return "the router has no place for the norm of such rows"
    return None


def run(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    gate: Weight,
    gate_dtype: torch.dtype,
    correction_bias: Tensor,
    *choice: Any,
    resident: ResidentWeights,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    norm = router.Norm(residual, norm_weight, eps)
    return router.fused_with_norm(x, norm, moe_route.prepare(gate, resident, gate_dtype), correction_bias, *choice)


register(op="norm_route", arm="device", variant="cuda", run=run, unsupported=unsupported, resident=True)
