"""Linear layer with a plain (BF16 or F32) weight.

x: (T, in), activation dtype; weight: a plain Weight (out, in). dtype: the activation dtype.
relu_squared, out_scale: see `hemiola.ops.epilogue`; what is written is then float8_e4m3fn where out_scale is given.
Returns (T, out) in dtype, or float8_e4m3fn.
Numerics: operands in the activation dtype, float32 accumulation, one rounding of the result. A weight stored in another
dtype is converted once and kept.

`linears`: several such layers of one input, without what follows on a product. weights: plain Weights (out_i, in).
Returns a tuple of (T, out_i) in dtype, one a weight; they may be views of one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hemiola.formats.weight import Weight
from hemiola.ops.epilogue import finish
from hemiola.ops.kept import KeptForms
from hemiola.ops.table import register


def linear(
    x: torch.Tensor,
    weight: Weight,
    dtype: torch.dtype,
    relu_squared: bool = False,
    out_scale: float | None = None,
    *,
    kept: KeptForms,
) -> torch.Tensor:
    if weight.data.dtype == dtype:
        matrix = kept.data(weight)
    else:
        matrix = kept.get(weight, str(dtype), lambda: weight.data.to(dtype))
    return finish(torch.nn.functional.linear(x, matrix), dtype, relu_squared, out_scale)


def linears(
    x: torch.Tensor, weights: Sequence[Weight], dtype: torch.dtype, *, kept: KeptForms
) -> tuple[torch.Tensor, ...]:
    return tuple(linear(x, weight, dtype, kept=kept) for weight in weights)


def linear_float32(x: torch.Tensor, weight: Weight, *, kept: KeptForms) -> torch.Tensor:
    """The same product with its float32 accumulator returned unrounded; weights are rounded to x's dtype first."""

    def widen() -> torch.Tensor:
        return weight.data.to(x.dtype).float()

    if weight.data.dtype == torch.float32 == x.dtype:
        matrix = kept.data(weight)
    else:
        matrix = kept.get(weight, f"{x.dtype}-f32", widen)
    return torch.nn.functional.linear(x.float(), matrix)


register(op="linear", arm="reference", variant="torch", run=linear, keeps=True)
register(op="linears", arm="reference", variant="torch", run=linears, keeps=True)
