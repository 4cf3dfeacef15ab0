"""Embedding lookup on the device: the table is resident as it is stored."""

from __future__ import annotations

import torch

from hemiola.formats.weight import Weight
from hemiola.kernels import embedding as kernels
from hemiola.ops.resident import ResidentWeights
from hemiola.ops.table import register


def unsupported(token_ids: torch.Tensor, weight: Weight, dtype: torch.dtype) -> str | None:
    if dtype != torch.bfloat16:
        return f"activations are {dtype}: the device arm computes in bfloat16"
    return None


def prepare(weight: Weight, resident: ResidentWeights) -> torch.Tensor:
    return resident.get(weight.name, "stored", lambda: resident.upload(weight.data))


def embedding(
    token_ids: torch.Tensor, weight: Weight, dtype: torch.dtype, *, resident: ResidentWeights
) -> torch.Tensor:
    return kernels.embedding(token_ids, prepare(weight, resident))


register(
    op="embedding",
    arm="device",
    variant="triton",
    run=embedding,
    unsupported=unsupported,
    resident=True,
    prepare=prepare,
)
