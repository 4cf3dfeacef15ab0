"""NVFP4 weights in the order in which kernels read them: packing, in torch, and decoding, inside of kernels.

On disk byte b of a row holds columns 2b and 2b + 1. Packed, columns go in groups of 64, padded with zeros: byte b of
the 32 of group g holds column 64 g + b ("lo") in its high nibble and column 64 g + 32 + b ("hi") in its low one. So a
tile of packed bytes decodes element by element to two tiles of its own shape, whatever threads hold which bytes: what
the hardware wants of a matrix product's operand needs no exchange.

A code's bits read as the low bits of a bfloat16 exponent and the first of its mantissa are its value times 2^-126, the
subnormal one included: two codes that lie 16 bits apart become a pair of bfloat16 numbers by two masks and a shift.

Sixteen bytes at a multiple of sixteen hold one block of lo columns and one of hi columns. Their two scales make one
32-bit word, lo in its lower half: words of scales are a row of K / 32. Each is e4m3 times 2^119 in bfloat16, so that a
decoded weight is e2m1 times e4m3 times 2^-7, exact in bfloat16. What remains, 2^7 (`REMAINDER`), belongs to the
tensor's scale, which multiplies the accumulator.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP = 64
"""Columns of a group."""

REMAINDER = 128.0
"""What a decoded weight has still to be multiplied with, besides the tensor's scale."""

_CHUNK_BYTES = 1 << 26  # packed at a time, so that temporaries stay small beside a bank of experts


def padded_columns(columns: int) -> int:
    """Columns of a packed row: whole groups."""
    return -(-columns // GROUP) * GROUP


def pack_codes(data: Tensor) -> Tensor:
    """Codes from their order on disk to the packed order.

    data: (..., in / 2) uint8, contiguous, any device. Returns (..., padded_columns(in) / 2) uint8.
    """
    in_bytes = data.shape[-1]
    out_bytes = padded_columns(2 * in_bytes) // 2
    rows = data.reshape(-1, in_bytes)
    packed = torch.empty(len(rows), out_bytes, dtype=torch.uint8, device=data.device)
    step = max(1, _CHUNK_BYTES // out_bytes)
    for start in range(0, len(rows), step):
        part = torch.nn.functional.pad(rows[start : start + step], (0, out_bytes - in_bytes))
        lo, hi = part.view(len(part), -1, 2, 16).unbind(2)  # (rows, groups, 16): two columns a byte, the first low
        first = (lo << 4) | (hi & 0xF)
        second = (lo & 0xF0) | (hi >> 4)
        packed[start : start + step] = torch.stack((first, second), dim=-1).view(len(part), out_bytes)
    return packed.view(*data.shape[:-1], out_bytes)


def pack_scales(block_scale: Tensor) -> Tensor:
    """Block scales, widened, in words of two.

    block_scale: (..., in / 16) float8_e4m3fn, any device. Returns (..., padded_columns(in) / 32) int32.
    """
    scales = (block_scale.float() * 2.0**119).bfloat16()
    scales = torch.nn.functional.pad(scales, (0, -scales.shape[-1] % 4))
    words = scales.view(*scales.shape[:-1], -1, 2, 2).transpose(-1, -2).contiguous()  # lo and hi side by side
    return words.flatten(-3).view(torch.int32)


@triton.jit
def block_scales(words):
    """Words of two scales, int32 of any shape: those of the lo and those of the hi columns, bfloat16."""
    lo = words.to(tl.int16).to(tl.bfloat16, bitcast=True)
    hi = (words >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return lo, hi


@triton.jit
def per_byte(scales, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Scales (ROWS, WORDS) repeated for each of the sixteen bytes that they belong to: (ROWS, 16 * WORDS)."""
    return tl.reshape(tl.broadcast_to(scales[:, :, None], (ROWS, WORDS, 16)), (ROWS, 16 * WORDS))


@triton.jit
def decode(packed, lo_scale, hi_scale, ASM: tl.constexpr):
    """A tile of packed bytes, uint8, to its lo and hi columns: e2m1 times e4m3 times 2^-7, bfloat16.

    lo_scale, hi_scale: bfloat16 of the tile's shape, `per_byte` of `block_scales`. ASM: pairs in inline assembly;
    without it, the same values by plain operations.
    """
    if ASM:
        # $0 $1: lo pairs; $2 $3: hi pairs; $4: four bytes; $5 $6 and $7 $8: their scales.
        lo, hi = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, m, q, zero;
            mov.b32 zero, 0x80008000;
            prmt.b32 a, $4, 0, 0x1404;
            prmt.b32 b, $4, 0, 0x3424;
            shr.b32 m, a, 6;
            and.b32 m, m, 0x01C001C0;
            lop3.b32 m, a, 0x80008000, m, 0xEA;
            fma.rn.bf16x2 $0, m, $5, zero;
            shr.b32 m, b, 6;
            and.b32 m, m, 0x01C001C0;
            lop3.b32 m, b, 0x80008000, m, 0xEA;
            fma.rn.bf16x2 $1, m, $6, zero;
            shl.b32 q, a, 4;
            shr.b32 m, a, 2;
            and.b32 m, m, 0x01C001C0;
            lop3.b32 m, q, 0x80008000, m, 0xEA;
            fma.rn.bf16x2 $2, m, $7, zero;
            shl.b32 q, b, 4;
            shr.b32 m, b, 2;
            and.b32 m, m, 0x01C001C0;
            lop3.b32 m, q, 0x80008000, m, 0xEA;
            fma.rn.bf16x2 $3, m, $8, zero;
            }
            """,
            "=&r,=&r,=&r,=r,r,r,r,r,r",
            [packed, lo_scale, hi_scale],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        lo = _value(packed >> 4) * lo_scale
        hi = _value(packed & 0xF) * hi_scale
    return lo, hi


@triton.jit
def _value(code):
    """A code's value times 2^-126, bfloat16."""
    bits = code.to(tl.int32)
    return (((bits & 8) << 12) | ((bits & 7) << 6)).to(tl.int16).to(tl.bfloat16, bitcast=True)
