"""Linear layer with an FP8 weight and statically quantised activations (W8A8).

x: (T, in), activation dtype, or float8_e4m3fn: codes that the op before quantised with this weight's input_scale.
weight: an FP8 Weight (out, in) with scale and input_scale. dtype: the activation dtype.
relu_squared, out_scale: see `hemiola.ops.epilogue`; what is written is then float8_e4m3fn where out_scale is given.
Returns (T, out) in dtype, or float8_e4m3fn:

    q = e4m3(x / input_scale), saturating at +-448, round half to even
    y = (q @ codes^T) * (input_scale * scale)

Numerics: products of e4m3 codes are exact in float32; float32 accumulation; one rounding of the result. The activation
is quantised in every numeric mode, because it is part of what the checkpoint says.
Source: NVIDIA ModelOpt FP8 static per-tensor export; vLLM 0.25.0 layers/quantization/modelopt.py.
"""

from __future__ import annotations

import torch

from hemiola.formats.quant import fp8
from hemiola.formats.weight import Weight
from hemiola.ops.epilogue import finish
from hemiola.ops.kept import KeptForms
from hemiola.ops.table import register


def linear_fp8(
    x: torch.Tensor,
    weight: Weight,
    dtype: torch.dtype,
    relu_squared: bool = False,
    out_scale: float | None = None,
    *,
    kept: KeptForms,
) -> torch.Tensor:
    return finish(linear_fp8_float32(x, weight, kept=kept), dtype, relu_squared, out_scale)


def linear_fp8_float32(x: torch.Tensor, weight: Weight, *, kept: KeptForms) -> torch.Tensor:
    """The same product with its float32 result returned unrounded."""
    assert weight.scale is not None, f"{weight.name} has no weight scale"
    assert weight.input_scale is not None, f"{weight.name} has no input scale"
    codes = kept.get(weight, "codes-f32", weight.codes)
    q = (x if x.dtype == torch.float8_e4m3fn else fp8.quantize(x.float(), weight.input_scale)).float()
    return torch.nn.functional.linear(q, codes) * (weight.input_scale * weight.scale)


register(op="linear_fp8", arm="reference", variant="torch", run=linear_fp8, keeps=True)
