"""Squared ReLU, the activation of every MLP and expert of the family (never gated).

x: any shape, activation dtype. Returns max(x, 0)^2, rounded once.
Source: vLLM 0.25.0 model_executor/models/nemotron_h.py (relu2).
"""

from __future__ import annotations

import torch

from hemiola.ops.table import register


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x).square()


register(op="relu_squared", arm="reference", variant="torch", run=relu_squared)
