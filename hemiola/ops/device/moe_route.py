"""Choice of experts on a GPU: `kernels.router`. Contract: `ops.moe_route`; ids are int32."""

from __future__ import annotations

from torch import Tensor

from hemiola.kernels import router
from hemiola.ops.table import register


def run(
    logits: Tensor, correction_bias: Tensor, top_k: int, router_groups: int, topk_router_groups: int, normalise: bool
) -> tuple[Tensor, Tensor]:
    return router.moe_route(logits, correction_bias, top_k, router_groups, topk_router_groups, normalise)


register(op="moe_route", arm="device", variant="triton", run=run)
