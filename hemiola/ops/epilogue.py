"""What a linear may do to its product before it writes it: squared ReLU, and quantisation for a W8A8 product behind.

Squared ReLU is the activation of every MLP and expert of the family (never gated).
Source: vLLM 0.25.0 model_executor/models/nemotron_h.py (relu2).
"""

from __future__ import annotations

import torch

from hemiola.formats.quant import fp8


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)^2, rounded once. x: any shape, activation dtype."""
    return torch.relu(x).square()


def finish(
    product: torch.Tensor, dtype: torch.dtype, has_relu_squared: bool = False, out_scale: float | None = None
) -> torch.Tensor:
    """`product` rounded to dtype; then, where asked for, its squared ReLU, rounded; then e4m3 of that / out_scale."""
    y = product.to(dtype)
    if has_relu_squared:
        y = relu_squared(y)
    return y if out_scale is None else fp8.quantize(y.float(), out_scale)
