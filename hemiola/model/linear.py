"""Linear: a weight and the op that its scheme needs."""

from __future__ import annotations

import torch

from hemiola.formats.weight import Scheme, Weight
from hemiola.ops import Ops
from hemiola.tap import Tap

OP_OF_SCHEME = {Scheme.PLAIN: "linear", Scheme.FP8: "linear_fp8", Scheme.NVFP4: "linear_nvfp4"}


class Linear:
    """x (T, in) -> (T, out), in x's dtype. Which op computes it follows from the weight's scheme on disk."""

    def __init__(self, weight: Weight, ops: Ops) -> None:
        self.weight = weight
        self._product = getattr(ops, OP_OF_SCHEME[weight.scheme])
        self._tap_name = f"{weight.name}.input"

    def __call__(self, x: torch.Tensor, tap: Tap | None = None) -> torch.Tensor:
        if tap is not None:
            tap(self._tap_name, x)
        y: torch.Tensor = self._product(x, self.weight)
        return y
