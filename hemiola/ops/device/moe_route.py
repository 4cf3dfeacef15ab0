"""Choice of experts on a GPU: `kernels.router`. Contract: `ops.moe_route`; ids are int32."""

from __future__ import annotations

import torch
from torch import Tensor

from hemiola.formats.weight import Weight
from hemiola.kernels import router
from hemiola.ops.resident import ResidentWeights
from hemiola.ops.table import register


def unsupported(
    x: Tensor, gate: Weight, gate_dtype: torch.dtype, correction_bias: Tensor, *choice: int | bool
) -> str | None:
    if x.dtype != torch.bfloat16:
        return "activations are float32: the device arm computes in bfloat16"
    if gate_dtype not in (torch.bfloat16, torch.float32):
        return f"the gate is {gate_dtype}, not bfloat16 or float32"
    return None


def prepare(gate: Weight, resident: ResidentWeights, gate_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The gate (E, hidden) in gate_dtype, at an address that is a multiple of 16; built once."""

    def build() -> Tensor:
        matrix = resident.upload(gate.data).to(gate_dtype)
        return matrix.clone() if matrix.data_ptr() % 16 else matrix

    return resident.get(gate.name, f"gate {gate_dtype}", build)


def run(
    x: Tensor,
    gate: Weight,
    gate_dtype: torch.dtype,
    correction_bias: Tensor,
    top_k: int,
    router_groups: int,
    topk_router_groups: int,
    normalise: bool,
    *,
    resident: ResidentWeights,
    invariant: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return router.route(
        x,
        prepare(gate, resident, gate_dtype),
        correction_bias,
        top_k,
        router_groups,
        topk_router_groups,
        normalise,
        invariant=invariant,
    )


register(
    op="moe_route",
    arm="device",
    variant="triton",
    run=run,
    unsupported=unsupported,
    resident=True,
    invariant=True,
    prepare=prepare,
)
