"""Reading memory and nothing else: what weights can be streamed at. A copy is slower, since memory turns around."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, STEPS = 4096, 32  # words at a time, and times, of a program


@triton.jit
def read_kernel(words, out, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    program = tl.program_id(0)
    at = words + program.to(tl.int64) * (BLOCK * STEPS) + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.int32)
    for step in range(STEPS):
        acc ^= tl.load(at + step * BLOCK)
    tl.store(out + program, tl.xor_sum(acc, 0))


def read(words: Tensor) -> Tensor:
    """words: int32, a multiple of BLOCK * STEPS of them. Returns the exclusive or of each such part, int32."""
    num_parts, rest = divmod(words.numel(), BLOCK * STEPS)
    assert not rest, f"{words.numel()} words are no multiple of {BLOCK * STEPS}"
    out = torch.empty(num_parts, dtype=torch.int32, device=words.device)
    read_kernel[(num_parts,)](words, out, BLOCK=BLOCK, STEPS=STEPS, num_warps=8)
    return out
