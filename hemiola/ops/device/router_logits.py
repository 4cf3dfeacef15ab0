"""Router logits on a GPU: `kernels.router`. Contract: `ops.router_logits`."""

from __future__ import annotations

import torch
from torch import Tensor

from hemiola.formats.weight import Weight
from hemiola.kernels import router
from hemiola.ops.resident import ResidentWeights
from hemiola.ops.table import register


def unsupported(x: Tensor, weight: Weight, gate_dtype: torch.dtype) -> str | None:
    if x.dtype != torch.bfloat16:
        return "activations are float32: the device arm computes in bfloat16"
    if gate_dtype not in (torch.bfloat16, torch.float32):
        return f"the gate is {gate_dtype}, not bfloat16 or float32"
    return None


def prepare(weight: Weight, resident: ResidentWeights, gate_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The gate (E, hidden) in gate_dtype; built once."""
    return resident.get(weight.name, f"gate {gate_dtype}", lambda: resident.upload(weight.data).to(gate_dtype))


def run(x: Tensor, weight: Weight, gate_dtype: torch.dtype, *, resident: ResidentWeights, invariant: bool) -> Tensor:
    return router.router_logits(x, prepare(weight, resident, gate_dtype), invariant=invariant)


register(
    op="router_logits",
    arm="device",
    variant="triton",
    run=run,
    unsupported=unsupported,
    resident=True,
    invariant=True,
    prepare=prepare,
)
