"""The sum of a token's experts, and the next layer's norm of it, in one launch: see combine_norm.cu."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from hemiola.kernels.cuda import CudaFunction, CudaModule, missing, source_of
from hemiola.kernels.launch import capability, uses_pdl
from hemiola.kernels.rms_norm import takes_cuda

KERNEL = "combine_norm_kernel"
MOST_EXPERTS = 8  # of a token: so many rows lie in a thread's registers


def unsupported(hidden: int, top_k: int, residual: Tensor, norm_weight: Tensor) -> str | None:
    """Why the kernel cannot sum top_k experts of rows of `hidden` and norm them, or None."""
    if capability() < 90:
        return "the norm is in Triton before compute capability 9.0"
    if top_k > MOST_EXPERTS:
        return f"{top_k} experts a token are more than {MOST_EXPERTS}"
    if residual.shape[1] != hidden or not takes_cuda(residual, None, norm_weight):
        return "rows cannot be read 16 bytes at a time"
    return missing()


@cache
def _function(hidden: int, top_k: int, pairs: int, num_shared: int, has_shared: bool, quantises: bool) -> CudaFunction:
    options = {
        "HIDDEN": hidden, "TOP_K": top_k, "PAIRS": pairs, "NUM_SHARED": num_shared, "SHARED": int(has_shared),
        "QUANTISES": int(quantises),
    }  # fmt: skip
    module = CudaModule(source_of("norm.cuh", "combine_norm.cu"), tuple(f"-D{k}={v}" for k, v in options.items()))
    return module.function(KERNEL, "PPPlfPlPPPff")


def combine_norm(
    parts: Tensor,
    pieces: Tensor | None,
    top_k: int,
    routed_scale: float,
    shared: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    out_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of what `experts.combine` gives for the first five arguments, to the bit.

    residual: (T, hidden) bfloat16 with contiguous rows; norm_weight: (hidden,) bfloat16; `unsupported` says which.
    shared: rows may lie apart, by a multiple of 8 numbers, and begin at a multiple of 16 bytes. Returns (y, s), (T,
    hidden) each: bfloat16; with out_scale y is float8_e4m3fn.
    """
    (num_tokens, hidden), num_shared = residual.shape, 0 if pieces is None else pieces.shape[1]
    assert shared is None or not num_shared, "the shared expert twice"
    assert shared is None or (shared.stride(0) % 8 == 0 and shared.data_ptr() % 16 == 0), "rows of 16 bytes at a time"
    y = torch.empty(
        num_tokens, hidden, dtype=parts.dtype if out_scale is None else torch.float8_e4m3fn, device=parts.device
    )
    total = torch.empty(num_tokens, hidden, dtype=parts.dtype, device=parts.device)
    if not num_tokens:
        return y, total
    pairs = len(parts) // num_tokens
    _function(hidden, top_k, pairs, num_shared, shared is not None, out_scale is not None).launch(
        (num_tokens, 1, 1),
        (32 * triton.cdiv(hidden, 256), 1, 1),
        (
            parts, pieces, shared, 0 if shared is None else shared.stride(0), routed_scale, residual,
            residual.stride(0), norm_weight, y, total, eps, 1.0 if out_scale is None else out_scale,
        ),
        pdl=uses_pdl(),
    )  # fmt: skip
    return y, total
