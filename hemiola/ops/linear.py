"""Linear layer with a plain (BF16 or F32) weight.

x: (T, in), activation dtype; weight: a plain Weight (out, in). Returns (T, out) in the activation dtype.
Numerics: operands in the activation dtype, float32 accumulation, one rounding of the result. A weight stored in another
dtype is converted once and kept.
"""

from __future__ import annotations

import torch

from hemiola.formats.weight import Weight
from hemiola.ops.kept import KeptForms
from hemiola.ops.table import register


def linear(x: torch.Tensor, weight: Weight, *, kept: KeptForms) -> torch.Tensor:
    matrix = weight.data
    if matrix.dtype != x.dtype:
        matrix = kept.get(weight, str(x.dtype), lambda: weight.data.to(x.dtype))
    return torch.nn.functional.linear(x, matrix)


def linear_float32(x: torch.Tensor, weight: Weight, *, kept: KeptForms) -> torch.Tensor:
    """The same product with its float32 accumulator returned unrounded; weights are rounded to x's dtype first."""

    def widen() -> torch.Tensor:
        return weight.data.to(x.dtype).float()

    matrix = weight.data if weight.data.dtype == torch.float32 == x.dtype else kept.get(weight, f"{x.dtype}-f32", widen)
    return torch.nn.functional.linear(x.float(), matrix)


register(op="linear", arm="reference", variant="torch", run=linear, keeps=True)
