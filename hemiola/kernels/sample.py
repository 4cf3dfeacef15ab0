"""The best of each row of logits: ids by argmax, and the k best with their log-probabilities.

Order: a larger logit first, equal ones by id, the lower first; NaN above everything, as in torch; -0 equals +0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hemiola.kernels.launch import gdc_launch_dependents, gdc_wait, launch_options, uses_pdl

_FEW_ROWS = 8  # up to here, smaller pieces of a row keep the GPU busy
_MAX_ID = 2**31 - 1


@triton.jit
def _rank(logits):
    """float32 -> int32 that compares as the module's docstring says."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    rank = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(logits != logits, 0x7FFFFFFF, rank)


@triton.jit(do_not_specialize=["stride_row"])
def _best_of_piece_kernel(logits, best, stride_row, VOCAB: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """best: (R, pieces) int64, the rank above the id counted down, so that the largest number is the best."""
    piece = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    ids = piece * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    values = tl.load(logits + row * stride_row + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    rank = _rank(values)
    largest = tl.max(rank, 0)
    lowest_id = tl.min(tl.where(rank == largest, ids, 0x7FFFFFFF), 0)
    tl.store(best + row * tl.num_programs(0) + piece, (largest.to(tl.int64) << 32) | (0x7FFFFFFF - lowest_id))


@triton.jit
def _best_piece_kernel(best, out, PIECES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    pieces = tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    packed = tl.load(best + row * PIECES + pieces, mask=pieces < PIECES, other=-(2**63))
    tl.store(out + row, 0x7FFFFFFF - (tl.max(packed, 0) & 0x7FFFFFFF))


def argmax(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """logits: (R, V) bfloat16 or float32, unit stride along V. out: (R,) int64, where given. Returns the best id of
    every row, (R,) int64."""
    num_rows, vocab = logits.shape
    assert logits.stride(1) == 1, "the rows are not contiguous"
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    block = 1024 if num_rows <= _FEW_ROWS else 4096
    pieces = triton.cdiv(vocab, block)
    best = torch.empty(num_rows, pieces, dtype=torch.int64, device=logits.device)
    pdl = uses_pdl()
    _best_of_piece_kernel[(pieces, num_rows)](
        logits, best, logits.stride(0), VOCAB=vocab, BLOCK=block, PDL=pdl, num_warps=4, **launch_options(pdl)
    )
    _best_piece_kernel[(num_rows,)](
        best,
        out,
        PIECES=pieces,
        BLOCK=triton.next_power_of_2(pieces),
        PDL=pdl,
        num_warps=1,
        **launch_options(pdl),
    )
    return out


def order_keys(logits: torch.Tensor) -> torch.Tensor:
    """(R, V) bfloat16 or float32 -> (R, V) int64, all different within a row: a larger key is a better id."""
    values = logits.float()
    bits = torch.where(values == 0, 0.0, values).view(torch.int32)
    rank = torch.where(bits < 0, bits ^ _MAX_ID, bits).masked_fill(values.isnan(), _MAX_ID)
    countdown = _MAX_ID - torch.arange(logits.shape[1], device=logits.device)
    return (rank.long() << 32) | countdown


def best_ids(logits: torch.Tensor, k: int) -> torch.Tensor:
    """The k best ids of every row, best first, (R, k) int64; 0 <= k <= V. logits: (R, V) bfloat16 or float32."""
    keys = order_keys(logits)
    best = keys.topk(k, dim=1).values if k < logits.shape[1] else keys.sort(dim=1, descending=True).values
    return _MAX_ID - (best & _MAX_ID)


def top_logprobs(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best of every row, best first: their log-probabilities (R, k) float32 and ids (R, k) int64.

    logits: (R, V) bfloat16 or float32. The log-softmax is float32; the ranking is that of the logits.
    """
    ids = best_ids(logits, k)
    return logits.log_softmax(dim=-1, dtype=torch.float32).gather(1, ids), ids
