"""Linears of every scheme as a kernel's test wants them: launched, and computed in float64 with every rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from hemiola.formats.weight import Scheme, Weight
from hemiola.kernels import nvfp4
from hemiola.kernels.linear_bf16 import linear_bf16
from hemiola.kernels.linear_fp8 import Fp8Weight, linear_fp8
from hemiola.kernels.linear_nvfp4 import linear_nvfp4
from tests.support.numerics import bf16
from tests.support.weights import e4m3_nearest


def finished(product: Tensor, relu_squared: bool = False, out_scale: float | None = None) -> Tensor:
    """product: float64, unrounded. float64: what is written."""
    y = bf16(product)
    if relu_squared:
        y = bf16(y.clamp(min=0).square())
    return y if out_scale is None else e4m3_nearest((y.float() / torch.tensor(out_scale)).double())


def fp8_form(weight: Weight, device: torch.device | str = "cpu") -> Fp8Weight:
    assert weight.scale is not None
    assert weight.input_scale is not None
    scale = weight.scale * weight.input_scale
    return Fp8Weight(weight.data.to(device), weight.input_scale, scale, torch.full((1,), scale, device=device))


def launch(
    x: Tensor,
    weight: Weight,
    relu_squared: bool = False,
    out_scale: float | None = None,
    invariant: bool = False,
) -> Tensor:
    """The launcher of the weight's scheme, on x's device."""
    if weight.scheme is Scheme.PLAIN:
        return linear_bf16(x, weight.data.to(x.device), relu_squared, out_scale, invariant)
    if weight.scheme is Scheme.FP8:
        return linear_fp8(x, fp8_form(weight, x.device), relu_squared, out_scale, invariant)
    assert weight.block_scale is not None
    assert weight.scale is not None
    packed = nvfp4.packed(weight.data.to(x.device), weight.block_scale.to(x.device))
    return linear_nvfp4(x, *packed, len(weight.data), weight.scale, relu_squared, out_scale, invariant)
