"""Products of e4m3 codes: the weight streamed past a row or two; then, on Hopper, wgmma, and cuBLAS for many rows."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from hemiola.kernels import dense_wgmma
from hemiola.kernels.linear_dense import GemvTile, dot, gemv, gemv_tile
from hemiola.kernels.quantize import finish, quantize
from hemiola.kernels.split_k import DotTile

GEMV_ROWS = 2
GEMV = GemvTile(rows=8, columns=512)
INVARIANT = DotTile(64, 64, 128, 4, 4)
# What cuBLAS cannot take: sizes that are no multiple of 16.
FALLBACK = DotTile(64, 64, 64, 2, 4)


class Fp8Weight(NamedTuple):
    """codes: (out, in) float8_e4m3fn. input_scale: of the activation. scale: of the product. on_device: that, (1,)."""

    codes: Tensor
    input_scale: float
    scale: float
    on_device: Tensor


def linear_fp8(
    x: Tensor,
    weight: Fp8Weight,
    relu_squared: bool = False,
    out_scale: float | None = None,
    invariant: bool = False,
    early: bool = False,
) -> Tensor:
    """(e4m3(x / input_scale) @ codes^T) * scale, finished as `hemiola.kernels.quantize` says.

    x: (T, in), rows contiguous, bfloat16, or float8_e4m3fn codes already. invariant: one tile for any T.
    early: of codes, as of `dense_wgmma.linear`.
    Returns (T, out) bfloat16, or float8_e4m3fn where out_scale is given.
    """
    if x.dtype != torch.float8_e4m3fn:
        x, early = quantize(x, weight.input_scale), False
    num_tokens, in_size = x.shape
    fits = in_size % 16 == 0 and len(weight.codes) % 16 == 0
    if invariant:
        return dot(x, weight.codes, weight.scale, relu_squared, out_scale, INVARIANT if fits else FALLBACK)
    if num_tokens <= GEMV_ROWS and (streaming := gemv_tile(GEMV, in_size)):
        return gemv(x, weight.codes, weight.scale, relu_squared, out_scale, streaming)
    if not fits:
        return dot(x, weight.codes, weight.scale, relu_squared, out_scale, FALLBACK)
    if dense_wgmma.takes(x, weight.codes):
        return dense_wgmma.linear(x, weight.codes, weight.scale, relu_squared, out_scale, early=early)
    y = torch._scaled_mm(
        x.contiguous(), weight.codes.T, weight.on_device, _one(x.device), out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return finish(y, relu_squared, out_scale)


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones(1, dtype=torch.float32, device=device)
