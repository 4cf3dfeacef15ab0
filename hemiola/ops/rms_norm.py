"""RMSNorm over the hidden size, fused with the residual addition that precedes it.

    s = x + residual;  y = s * rsqrt(mean(s^2) + eps) * weight

x, residual: (T, hidden), activation dtype; residual None before the first layer, where s = x.
weight: (hidden,).
Returns (y, s): both (T, hidden) in the activation dtype.
Numerics: the sum, the variance and the normalisation are float32 and use the unrounded sum; the new residual is the sum
rounded once; the normalised value is rounded to the activation dtype before it is multiplied by the weight.
Source: vLLM 0.25.0 ir/ops/layernorm.py (native RMSNorm).
"""

from __future__ import annotations

import torch

from hemiola.ops.table import register


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x.float() if residual is None else x.float() + residual.float()
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    return (total * scale).to(x.dtype) * weight, total.to(x.dtype)


register(op="rms_norm", arm="reference", variant="torch", run=rms_norm)
