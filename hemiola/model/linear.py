"""Linear: a weight and the op that its scheme needs."""

from __future__ import annotations

import torch

from hemiola.formats.weight import Scheme, Weight
from hemiola.ops import Ops
from hemiola.tap import Tap

OP_OF_SCHEME = {Scheme.PLAIN: "linear", Scheme.FP8: "linear_fp8", Scheme.NVFP4: "linear_nvfp4"}


class Linear:
    """x (T, in) -> (T, out) in `dtype`, the activations'. The op that computes it follows from the scheme on disk.

    input_scale: of a W8A8 product, None otherwise: the op before may quantise with it, and x is then float8_e4m3fn.
    """

    def __init__(self, weight: Weight, dtype: torch.dtype, ops: Ops) -> None:
        self.weight, self.dtype, self._ops = weight, dtype, ops
        self.input_scale = weight.input_scale if weight.scheme is Scheme.FP8 else None
        self._product = getattr(ops, OP_OF_SCHEME[weight.scheme])
        self._tap_name = f"{weight.name}.input"

    def __call__(
        self,
        x: torch.Tensor,
        tap: Tap | None = None,
        *,
        relu_squared: bool = False,
        out_scale: float | None = None,
    ) -> torch.Tensor:
        """relu_squared, out_scale: see `hemiola.ops.epilogue`."""
        if tap is not None:
            tap(self._tap_name, x)
        y: torch.Tensor = self._product(x, self.weight, self.dtype, relu_squared, out_scale)
        return y

    def warm(self) -> None:
        """Bring the weight to where its op reads it."""
        self._ops.prepare(OP_OF_SCHEME[self.weight.scheme], self.weight)
