"""NVFP4 weights in the order in which kernels read them: packing, in torch, and decoding, inside of kernels.

On disk byte b of a row holds columns 2b and 2b + 1. Packed, columns go in groups of 64, padded with zeros. A group is
32 bytes, eight little-endian words; word w holds columns 4w .. 4w + 3 ("lo") and 32 + 4w .. 32 + 4w + 3 ("hi"), from
the highest nibble to the lowest: lo[1] lo[3] hi[1] hi[3] lo[0] lo[2] hi[0] hi[2]. Shifting a word left by 0, 4, 8 and
12 bits brings two neighbouring codes to the top of its halves, where two masks make two bfloat16 numbers of them: a
code's bits read as the low bits of a bfloat16 exponent and the first of its mantissa are its value times 2^-126, the
subnormal one included. So a tile of packed bytes decodes, without moving anything between threads, to two tiles of its
own shape: byte b of group g gives columns 64 g + b (lo) and 64 g + 32 + b (hi).

Sixteen bytes at a multiple of sixteen hold one block of lo columns and one of hi columns. Their two e4m3 scales make
one 16-bit word, lo in its low byte: words of scales are a row of K / 32. In a kernel a scale is e4m3 times 2^119, so
that a decoded weight is e2m1 times e4m3 times 2^-7, exact in bfloat16. What remains, 2^7 (`REMAINDER`), belongs to the
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
    return triton.cdiv(columns, GROUP) * GROUP


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
        # (rows, groups, lo or hi, words, bytes of a word): columns 4w, 4w + 1 in the first byte, then 4w + 2, 4w + 3.
        part = part.view(len(part), -1, 2, 8, 2)
        first, second = part[..., 0], part[..., 1]
        even = (first << 4) | (second & 0xF)
        odd = (first & 0xF0) | (second >> 4)
        lo, hi = 0, 1
        words = torch.stack((even[:, :, hi], even[:, :, lo], odd[:, :, hi], odd[:, :, lo]), dim=-1)
        packed[start : start + step] = words.view(len(part), out_bytes)
    return packed.view(*data.shape[:-1], out_bytes)


def pack_scales(block_scale: Tensor) -> Tensor:
    """Block scales in words of two, as kernels read them.

    block_scale: (..., in / 16) float8_e4m3fn, any device. Returns (..., padded_columns(in) / 32) int16.
    """
    blocks = block_scale.shape[-1]
    padded = torch.nn.functional.pad(block_scale.view(torch.uint8), (0, -blocks % 4))
    words = padded.view(*block_scale.shape[:-1], -1, 2, 2).transpose(-1, -2).contiguous()  # lo and hi side by side
    return words.flatten(-3).view(torch.int16)


@triton.jit
def block_scales(words):
    """Words of two scales, int16 of any shape: the lo and the hi blocks' scales, bfloat16, times 2^119."""
    bits = words.to(tl.int32)
    lo = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
    hi = ((bits & 0x8000) << 16) | ((bits & 0x7F00) << 12)
    return _widen(lo), _widen(hi)


@triton.jit
def _widen(bits):
    """Sign and, as the low bits of a float32 exponent and its mantissa, an e4m3 code: its value times 2^-120."""
    return (bits.to(tl.float32, bitcast=True) * 1.7014118346046923e38 * 5.192296858534828e33).to(tl.bfloat16)


@triton.jit
def per_byte(scales, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Scales (ROWS, WORDS) repeated for each of the sixteen bytes that they belong to: (ROWS, 16 * WORDS)."""
    return tl.reshape(tl.broadcast_to(scales[:, :, None], (ROWS, WORDS, 16)), (ROWS, 16 * WORDS))


@triton.jit
def decode(packed, lo_scale, hi_scale, ROWS: tl.constexpr, BYTES: tl.constexpr, ASM: tl.constexpr):
    """A tile of packed bytes, (ROWS, BYTES) uint8, to its lo and hi columns: e2m1 times e4m3 times 2^-7, bfloat16.

    lo_scale, hi_scale: (ROWS, BYTES) bfloat16, `per_byte` of `block_scales`. ASM: a thread has to hold whole words, in
    order, as it does where the bytes come from loads of four or more. Without it, the same values by plain operations.
    """
    if ASM:
        # $0 $1: lo pairs; $2 $3: hi pairs; $4: the word; $5: the lo scale, twice; $7: the hi scale, twice.
        lo, hi = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 q, m, z;
            mov.b32 z, 0x80008000;
            shr.b32 m, $4, 6;
            and.b32 m, m, 0x01C001C0;
            lop3.b32 m, $4, 0x80008000, m, 0xEA;
            fma.rn.bf16x2 $0, m, $5, z;
            shl.b32 q, $4, 4;
            shr.b32 m, $4, 2;
            and.b32 m, m, 0x01C001C0;
            lop3.b32 m, q, 0x80008000, m, 0xEA;
            fma.rn.bf16x2 $1, m, $5, z;
            shl.b32 q, $4, 8;
            shl.b32 m, $4, 2;
            and.b32 m, m, 0x01C001C0;
            lop3.b32 m, q, 0x80008000, m, 0xEA;
            fma.rn.bf16x2 $2, m, $7, z;
            shl.b32 q, $4, 12;
            shl.b32 m, $4, 6;
            and.b32 m, m, 0x01C001C0;
            lop3.b32 m, q, 0x80008000, m, 0xEA;
            fma.rn.bf16x2 $3, m, $7, z;
            }
            """,
            "=&r,=&r,=&r,=r,r,r,r,r,r",
            [packed, lo_scale, hi_scale],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        # Bytes of a word: hi[0] hi[2], lo[0] lo[2], hi[1] hi[3], lo[1] lo[3], the first code in the high nibble.
        hi_bytes, lo_bytes = tl.split(tl.reshape(packed, (ROWS, BYTES // 4, 2, 2)))
        lo = _values(lo_bytes, ROWS, BYTES) * lo_scale
        hi = _values(hi_bytes, ROWS, BYTES) * hi_scale
    return lo, hi


@triton.jit
def _values(pairs, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """(ROWS, words, 2) bytes, (even, odd) with codes 0, 2 and 1, 3: e2m1 times 2^-126, (ROWS, BYTES) bfloat16."""
    codes = tl.permute(tl.join(pairs >> 4, pairs & 0xF), (0, 1, 3, 2))
    bits = tl.reshape(codes, (ROWS, BYTES)).to(tl.int32)
    return (((bits & 8) << 12) | ((bits & 7) << 6)).to(tl.int16).to(tl.bfloat16, bitcast=True)
