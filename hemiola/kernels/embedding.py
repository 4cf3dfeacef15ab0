"""Rows of the embedding table, as bfloat16."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hemiola.kernels.launch import gdc_launch_dependents, gdc_wait, launch_options, uses_pdl

_BLOCK_H = 1024


@triton.jit
def _embedding_kernel(
    token_ids, weight, out, stride_weight, HIDDEN: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token_id = tl.load(token_ids + token).to(tl.int64)
    values = tl.load(weight + token_id * stride_weight + columns, mask=columns < HIDDEN)
    tl.store(out + token * HIDDEN + columns, values.to(tl.bfloat16), mask=columns < HIDDEN)


def embedding(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """token_ids: (T,) of any integer type, each a row of weight. weight: (vocab, hidden) bfloat16, float16 or float32,
    unit stride along hidden. Returns (T, hidden) bfloat16."""
    num_tokens, hidden = token_ids.shape[0], weight.shape[1]
    assert token_ids.is_contiguous(), "the ids are not contiguous"
    assert weight.stride(1) == 1, "the table's rows are not contiguous"
    out = torch.empty(num_tokens, hidden, dtype=torch.bfloat16, device=token_ids.device)
    if num_tokens == 0:
        return out
    pdl = uses_pdl()
    _embedding_kernel[(num_tokens, triton.cdiv(hidden, _BLOCK_H))](
        token_ids,
        weight,
        out,
        weight.stride(0),
        HIDDEN=hidden,
        BLOCK_H=_BLOCK_H,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
    return out
