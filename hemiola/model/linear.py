"""Linear: a weight and the op that its scheme needs. Several of one input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hemiola.formats.weight import Scheme, Weight
from hemiola.ops import Ops
from hemiola.tap import Tap

OP_OF_SCHEME = {Scheme.PLAIN: "linear", Scheme.FP8: "linear_fp8", Scheme.NVFP4: "linear_nvfp4"}

Begun = tuple[tuple[torch.Tensor, ...], torch.Tensor]  # of each weight an output, and the new residual


def _begin(ops: Ops, op: str, norm: tuple[Any, ...], weights: tuple[Weight, ...], dtype: torch.dtype) -> Begun | None:
    """The norm before `op` and that in one; None where they are two. norm: the first four arguments of `rms_norm`."""
    if not ops.takes("norm_linears", ("rms_norm", op), *norm, weights, dtype):
        return None
    begun: Begun = ops.norm_linears(*norm, weights, dtype)
    return begun


class Linear:
    """x (T, in) -> (T, out) in `dtype`, the activations'. The op that computes it follows from the scheme on disk.

    input_scale: of a W8A8 product, None otherwise: the op before may quantise with it, and x is then float8_e4m3fn.
    """

    def __init__(self, weight: Weight, dtype: torch.dtype, ops: Ops) -> None:
        self.weight, self.dtype, self._ops = weight, dtype, ops
        self.input_scale = weight.input_scale if weight.scheme is Scheme.FP8 else None
        self._op = OP_OF_SCHEME[weight.scheme]
        self._product = getattr(ops, self._op)
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

    def begin(self, *norm: Any) -> Begun | None:
        """See `_begin`."""
        return _begin(self._ops, self._op, norm, (self.weight,), self.dtype)

    def warm(self) -> None:
        """Bring the weight to where its op reads it."""
        self._ops.prepare(self._op, self.weight)


class Linears:
    """x (T, in) -> (T, out_i) of each linear, in one op where all weights are plain and none has a scale of its own."""

    def __init__(self, linears: Sequence[Linear], ops: Ops) -> None:
        self.linears, self._ops = tuple(linears), ops
        self._weights = tuple(linear.weight for linear in linears)
        self._is_one = all(weight.scheme is Scheme.PLAIN for weight in self._weights)
        input_scales = {linear.input_scale for linear in linears}
        self.input_scale = input_scales.pop() if len(input_scales) == 1 else None

    def __call__(self, x: torch.Tensor, tap: Tap | None = None) -> tuple[torch.Tensor, ...]:
        if not self._is_one:
            return tuple(linear(x, tap) for linear in self.linears)
        if tap is not None:
            for weight in self._weights:
                tap(f"{weight.name}.input", x)
        outputs: tuple[torch.Tensor, ...] = self._ops.linears(x, self._weights, self.linears[0].dtype)
        return outputs

    def begin(self, *norm: Any) -> Begun | None:
        """See `_begin`."""
        return _begin(self._ops, "linears", norm, self._weights, self.linears[0].dtype) if self._is_one else None

    def warm(self) -> None:
        """Bring the weights to where their op reads them."""
        if self._is_one:
            self._ops.prepare("linears", self._weights)
        else:
            for linear in self.linears:
                linear.warm()
