"""Grouped RMSNorm of the Mamba-2 mixer, gate first.

    v = y * silu(z);  out = v * rsqrt(mean over each group of v^2 + eps) * weight

y: (T, Di) scan output; z: (T, Di) gate; weight: (Di,); all in the activation dtype.
group_size: channels per group, Di / ssm_groups. The mean never crosses a group.
out_scale: where the result is what a W8A8 product takes, its activation scale.
Returns (T, Di) in the activation dtype; with out_scale float8_e4m3fn, e4m3(out / out_scale), saturating.
Numerics: float32 up to the normalised value, which is rounded before it is multiplied by the weight.
Source: vLLM 0.25.0 model_executor/layers/mamba/mamba_mixer2.py (Mixer2RMSNormGated, norm_before_gate False).
"""

from __future__ import annotations

import torch

from hemiola.formats.quant import fp8
from hemiola.ops.table import register


def gated_rms_norm(
    y: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    group_size: int,
    eps: float,
    out_scale: float | None = None,
) -> torch.Tensor:
    groups = (torch.nn.functional.silu(z.float()) * y.float()).view(y.shape[0], -1, group_size)
    norm = torch.linalg.vector_norm(groups, dim=-1, keepdim=True)  # a third of the time of a mean of squares
    scale = norm.square_().div_(group_size).add_(eps).rsqrt_()
    normalised: torch.Tensor = (groups * scale).view(y.shape).to(y.dtype)
    out = normalised * weight
    return out if out_scale is None else fp8.quantize(out.float(), out_scale)


register(op="gated_rms_norm", arm="reference", variant="torch", run=gated_rms_norm)
