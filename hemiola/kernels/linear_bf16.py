"""Products with a bfloat16 weight: streamed past a row or two; then, on Hopper, wgmma, and cuBLAS for many rows."""

from __future__ import annotations

import torch
from torch import Tensor

from hemiola.kernels import dense_wgmma
from hemiola.kernels.linear_dense import GemvTile, dot, gemv, gemv_tile
from hemiola.kernels.quantize import finish
from hemiola.kernels.split_k import DotTile

GEMV_ROWS = 2
GEMV_ROWS_OF_FEW = 4  # where there are at most FEW weight rows, too few to fill a GPU with tensor-core tiles
FEW = 1024
GEMV = GemvTile(rows=2, columns=512)
INVARIANT = DotTile(64, 64, 64, 4, 4)
INVARIANT_ODD = DotTile(64, 64, 32, 2, 4)


def linear_bf16(
    x: Tensor,
    weight: Tensor,
    relu_squared: bool = False,
    out_scale: float | None = None,
    invariant: bool = False,
    early: bool = False,
) -> Tensor:
    """x @ weight^T, finished as `hemiola.kernels.quantize` says.

    x: (T, in), rows contiguous; weight: (out, in), contiguous; bfloat16. invariant: one tile for any T. early: as of
    `dense_wgmma.linear`.
    Returns (T, out) bfloat16, or float8_e4m3fn where out_scale is given.
    """
    num_tokens, in_size = x.shape
    if invariant:
        return dot(x, weight, 1.0, relu_squared, out_scale, INVARIANT_ODD if in_size % 8 else INVARIANT)
    gemv_rows = GEMV_ROWS if len(weight) > FEW else GEMV_ROWS_OF_FEW
    if num_tokens <= gemv_rows and (tile := gemv_tile(GEMV, in_size)):
        return gemv(x, weight, 1.0, relu_squared, out_scale, tile)
    if dense_wgmma.takes(x, weight):
        return dense_wgmma.linear(x, weight, 1.0, relu_squared, out_scale, early=early)
    return finish(torch.nn.functional.linear(x, weight), relu_squared, out_scale)
