"""Dense MLP mixer (`-`): down(relu(up(x))^2). Also the shape of a shared expert."""

from __future__ import annotations

from typing import Any

import torch

from hemiola.model.batch import ForwardBatch
from hemiola.model.linear import Linear
from hemiola.model.specs import LayerCache
from hemiola.tap import Tap


class MLPMixer:
    def __init__(self, up_proj: Linear, down_proj: Linear) -> None:
        self.up_proj, self.down_proj = up_proj, down_proj
        self.input_scale = up_proj.input_scale

    def begin(self, *norm: Any) -> None:
        """The norm and up_proj are never one."""

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, cache: LayerCache, tap: Tap | None) -> torch.Tensor:
        return self.feed(x, tap)

    def feed(self, x: torch.Tensor, tap: Tap | None) -> torch.Tensor:
        """x: (T, hidden) -> (T, hidden)."""
        return self.down_proj(self.up_proj(x, tap, relu_squared=True, out_scale=self.down_proj.input_scale), tap)

    def warm(self) -> None:
        self.up_proj.warm()
        self.down_proj.warm()
