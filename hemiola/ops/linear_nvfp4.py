"""Linear layer with an NVFP4 weight, weight-only (what a W4A4 checkpoint is, too, where there are no FP4 units).

x: (T, in), activation dtype; weight: an NVFP4 Weight (out, in) with block scales and a global scale. dtype: the
activation dtype.
relu_squared, out_scale: see `hemiola.ops.epilogue`; what is written is then float8_e4m3fn where out_scale is given.
Returns (T, out) in dtype, or float8_e4m3fn:

    y = (x @ (e2m1 * block_scale)^T) * scale

Numerics: e2m1 times its e4m3 block scale is exact in bfloat16; float32 accumulation; the global scale multiplies the
accumulator; one rounding of the result. An input_scale in the file is not used by this product.
Source: vLLM 0.25.0 layers/quantization/utils/marlin_utils_fp4.py (W4A16).
"""

from __future__ import annotations

import torch

from hemiola.formats.weight import Weight
from hemiola.ops.epilogue import finish
from hemiola.ops.kept import KeptForms
from hemiola.ops.table import register


def linear_nvfp4(
    x: torch.Tensor,
    weight: Weight,
    dtype: torch.dtype,
    relu_squared: bool = False,
    out_scale: float | None = None,
    *,
    kept: KeptForms,
) -> torch.Tensor:
    return finish(linear_nvfp4_float32(x, weight, kept=kept), dtype, relu_squared, out_scale)


def linear_nvfp4_float32(x: torch.Tensor, weight: Weight, *, kept: KeptForms) -> torch.Tensor:
    """The same product with its float32 result returned unrounded."""
    assert weight.scale is not None, f"{weight.name} has no global scale"
    return torch.nn.functional.linear(x.float(), kept.get(weight, "codes-f32", weight.codes)) * weight.scale


register(op="linear_nvfp4", arm="reference", variant="torch", run=linear_nvfp4, keeps=True)
