"""The norm before a linear of a token or two, and the linear, in one launch: see norm_linear.cu."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from hemiola.kernels.cuda import CudaFunction, CudaModule, missing, source_of
from hemiola.kernels.launch import capability, num_sms, uses_pdl
from hemiola.kernels.rms_norm import takes_cuda

KERNEL = "norm_linear_kernel"
TOKENS = 2
"""Most tokens, as of the products in `linear_dense.gemv`."""


class Tile(NamedTuple):
    """rows: of the weight, that a warp takes at a time. warps: of a block. blocks: of a multiprocessor."""

    rows: int
    warps: int
    blocks: int


# By the most columns, for codes and for bfloat16: what a warp's rows leave of its registers.
TILES = {
    torch.float8_e4m3fn: ((2816, Tile(2, 8, 2)), (4096, Tile(1, 8, 2))),
    torch.bfloat16: ((2816, Tile(1, 8, 2)), (4096, Tile(1, 16, 1))),
}


def table_tile(columns: int, dtype: torch.dtype) -> Tile | None:
    return next((tile for most, tile in TILES[dtype] if columns <= most), None)


def unsupported(x: Tensor, residual: Tensor | None, norm_weight: Tensor, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot take these rows for a weight of dtype, or None."""
    num_tokens, columns = x.shape
    if not 0 < num_tokens <= TOKENS:
        return f"{num_tokens} tokens are not 1 to {TOKENS}"
    if capability() < 90:
        return "the norm is in Triton before compute capability 9.0"
    if columns * dtype.itemsize % 16 or table_tile(columns, dtype) is None:
        return f"there is no tile for rows of {columns}"
    if not takes_cuda(x, residual, norm_weight):
        return "rows cannot be read 16 bytes at a time"
    return missing()


@cache
def _function(columns: int, dtype: torch.dtype, tokens: int, has_residual: bool, tile: Tile) -> CudaFunction:
    options = {
        "COLUMNS": columns, "E4M3": int(dtype == torch.float8_e4m3fn), "TOKENS": tokens, "RESIDUAL": int(has_residual),
        "ROWS": tile.rows, "WARPS": tile.warps, "BLOCKS": tile.blocks,
    }  # fmt: skip
    module = CudaModule(source_of("norm.cuh", "norm_linear.cu"), tuple(f"-D{k}={v}" for k, v in options.items()))
    return module.function(KERNEL, "PlPlPPffPfPi")


def norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    alpha: float = 1.0,
    in_scale: float = 1.0,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """(alpha * y @ weight^T, s), with y and s as `rms_norm` gives them, to the bit.

    x, residual: (T, in) bfloat16 with contiguous rows; norm_weight: (in,). weight: (out, in), contiguous, at an address
    that is a multiple of 16: bfloat16, or float8_e4m3fn, for which y is e4m3(y / in_scale). tile: None takes the
    table's. Returns (T, out) and (T, in), bfloat16.
    """
    (num_tokens, columns), num_rows = x.shape, len(weight)
    assert weight.data_ptr() % 16 == 0, "weights are read 16 bytes at a time"
    tile = tile or table_tile(columns, weight.dtype)
    assert tile is not None, "unsupported() refuses such rows"
    y = torch.empty(num_tokens, num_rows, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    blocks = min(triton.cdiv(num_rows, tile.rows * tile.warps), tile.blocks * num_sms())
    _function(columns, weight.dtype, num_tokens, residual is not None, tile).launch(
        (blocks, 1, 1),
        (32 * tile.warps, 1, 1),
        (
            x, x.stride(0), residual, 0 if residual is None else residual.stride(0), norm_weight, total, eps, in_scale,
            weight, alpha, y, num_rows,
        ),
        pdl=uses_pdl(),
    )  # fmt: skip
    return y, total
