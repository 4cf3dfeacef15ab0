"""Rounds weights, during training, to the values the shipped formats can hold (NVFP4, FP8 e4m3).

Gradients pass straight through, so that the model learns weights which survive storage in a few bits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_E4M3_MAX, _E2M1_MAX, _BLOCK = 448.0, 6.0, 16


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype)


def round_fp8(w: Tensor) -> Tensor:
    """Nearest e4m3 values under one scale (amax / 448) per matrix of (..., out, in)."""
    scale = w.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(1e-12) / _E4M3_MAX
    return _e4m3(w / scale) * scale


def round_nvfp4(w: Tensor) -> Tensor:
    """Nearest NVFP4 values: e2m1 in blocks of 16 along the last dimension, an e4m3 scale per block, one per matrix."""
    whole = w.abs().amax(dim=(-2, -1), keepdim=True).unsqueeze(-1).clamp_min(1e-12) / (_E2M1_MAX * _E4M3_MAX)
    blocks = w.unflatten(-1, (-1, _BLOCK))
    scale = _e4m3(blocks.abs().amax(-1, keepdim=True) / _E2M1_MAX / whole).clamp_min(2.0**-9) * whole
    level = (blocks / scale).abs().clamp_max(_E2M1_MAX)
    step = torch.where(level < 2, 0.5, torch.where(level < 4, 1.0, 2.0))  # e2m1: 0 .5 1 1.5 2 3 4 6
    return (torch.round(level / step) * step * blocks.sign() * scale).flatten(-2)


class Rounding(nn.Module):
    """Applies one storage format ("nvfp4", "fp8") to a weight, blended in by ``share``: 0 not at all, 1 fully."""

    def __init__(self, scheme: str) -> None:
        super().__init__()
        self.share: Tensor
        self.register_buffer("share", torch.zeros(()), persistent=False)
        self._round = {"nvfp4": round_nvfp4, "fp8": round_fp8}[scheme]

    def forward(self, w: Tensor) -> Tensor:
        with torch.no_grad():
            offset = (self._round(w.float()).to(w.dtype) - w) * self.share
        return w + offset
