"""experts_norm on the device: moe_experts, its sum by `kernels.combine_norm`, for more than few tokens.

For few, whose experts are summed by the down projection, and where that cannot run, there is no variant: the two ops
run one after the other. So what is begun with the norm, `norm_route` and `norm_linears`, keeps its own: these are for
few tokens alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from hemiola.formats.weight import Experts
from hemiola.kernels import combine_norm as kernel
from hemiola.kernels import rows_mma
from hemiola.kernels.experts import FEW_TOKENS
from hemiola.ops.device import moe_experts
from hemiola.ops.resident import ResidentWeights
from hemiola.ops.table import register

FEW = max(*FEW_TOKENS.values(), *map(len, rows_mma.DIRECT.values()))


def unsupported(
    experts: tuple[Any, ...],
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    out_scale: float | None = None,
) -> str | None:
    x, ids, _, _, down, *_ = experts
    if len(x) <= FEW:
        return f"{len(x)} tokens are no more than {FEW}"
    if residual is None:
        return "there is no residual"
    refusals = [moe_experts.unsupported(*experts, joined=joined) for joined in (True, False)]
    if None not in refusals:
        return "; ".join(f"moe_experts: {reason}" for reason in refusals)
    return kernel.unsupported(down.shape[0], ids.shape[1], residual, norm_weight)


def run(
    experts: tuple[Any, ...],
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    out_scale: float | None = None,
    *,
    resident: ResidentWeights,
    invariant: bool,
) -> tuple[Tensor, Tensor]:
    _, _, _, up, down, *rest = experts
    joined = moe_experts.not_joined(Experts(up, down, rest[1] if len(rest) > 1 else None)) is None
    end = partial(kernel.combine_norm, residual=residual, norm_weight=norm_weight, eps=eps, out_scale=out_scale)
    result: tuple[Tensor, Tensor] = moe_experts.run(
        *experts, joined=joined, resident=resident, invariant=invariant, end=end
    )
    return result


register(
    op="experts_norm",
    arm="device",
    variant="cuda",
    run=run,
    unsupported=unsupported,
    resident=True,
    invariant=True,
)
