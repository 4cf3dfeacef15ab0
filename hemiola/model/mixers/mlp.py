"""Dense MLP mixer (`-`): down(relu(up(x))^2). Also the shape of a shared expert."""

from __future__ import annotations

import torch

from hemiola.model.batch import ForwardBatch
from hemiola.model.linear import Linear
from hemiola.model.specs import LayerCache
from hemiola.ops import Ops
from hemiola.tap import Tap


class MLPMixer:
    def __init__(self, up_proj: Linear, down_proj: Linear, ops: Ops) -> None:
        self.up_proj, self.down_proj, self.ops = up_proj, down_proj, ops

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, cache: LayerCache, tap: Tap | None) -> torch.Tensor:
        return self.feed(x, tap)

    def feed(self, x: torch.Tensor, tap: Tap | None) -> torch.Tensor:
        """x: (T, hidden) -> (T, hidden)."""
        return self.down_proj(self.ops.relu_squared(self.up_proj(x, tap)), tap)
