"""NVFP4 in 32-bit words that decode on their own: the form in which kernels read weights.

Columns go in groups of 64, padded with zeros; a row's group is eight words, and word w holds columns 8 j + w of the
group for j = 0 .. 7. So tile j of a tile of words is a tile of the words' shape, whose columns lie eight by eight side
by side. Decoding treats every word alike, wherever it lies: a compiler may put tiles into any layout, that of a tensor
core's operand included, and nothing has to move between threads afterwards.

Half a word (low: j = 0 .. 3, high: j = 4 .. 7) is four codes. The bits of a code, sign and magnitude, stand where a
shift or two take them to a bfloat16's sign and to the last bits of its exponent with the first of its mantissa, where
they are the code's value times 2^-126:

    j = 0, 4: sign 15, magnitude 8 7 6        j = 1, 5: sign 12, magnitude 5 4 3
    j = 2, 6: sign 14, magnitude 2 1 0        j = 3, 7: sign 13, magnitude 11 10 9

so that one shift in four goes to the right: to the left a multiplication shifts, in another pipe than logic.

A scale is one byte, five bits of exponent and three of mantissa: every e4m3 magnitude, the subnormal ones too, has such
a byte b, with (b << 4) | 0x7000 the bfloat16 of the scale times 2^119; b = 0 comes with codes that are all zero. The
sign of a scale goes into its codes. A group's four scales are a word; half a word is scale 0 (2) in bits 11 .. 4 and
scale 1 (3) in bits 3 .. 0 and 15 .. 12, so that swapping the bytes of a half brings it to the same place.

A decoded weight is e2m1 times e4m3 times 2^-7, exact in bfloat16; `REMAINDER` is what the tensor's scale makes up for.

In memory words lie in the tiles of `tiles`: 16 rows and 16 words; a row has a multiple of 16 words. The scales of a
tile, two of each row, are 32 words: those of rows r and r + 8 side by side, for both groups of r, for r = 0 .. 7.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hemiola.kernels.tiles import TILE, tile_column, tile_row

GROUP = 64
"""Columns of a group."""

TENSOR_MEMORY = (100, 103)
"""Compute capabilities that keep decoded tiles in tensor memory: eight of more than 64 rows are more than it holds."""

PACKED_ROWS, PACKED_GROUPS = 8, 16
"""What a program of `pack_words` packs."""

REMAINDER = 128.0
"""What a decoded weight has still to be multiplied with, besides the tensor's scale."""


def words_per_row(columns: int) -> int:
    """Words of a row: eight a group, and whole tiles."""
    return -(-columns // (8 * TILE)) * TILE


def packed(data: Tensor, block_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Words and scales, as of `pack_words`, of a weight of any number of rows: it is padded to whole tiles."""
    missing = -len(data) % TILE
    if missing:
        data = torch.nn.functional.pad(data, (0, 0, 0, missing))
        scale_bytes = torch.nn.functional.pad(block_scale.view(torch.uint8), (0, 0, 0, missing))
        block_scale = scale_bytes.view(torch.float8_e4m3fn)
    size = words_per_row(16 * block_scale.shape[1])
    words, scales = (torch.empty(len(data), n, dtype=torch.int32, device=data.device) for n in (size, size // 8))
    pack_words(data, block_scale, words, scales)
    return words, scales


def pack_words(data: Tensor, block_scale: Tensor, words: Tensor, scales: Tensor) -> None:
    """Pack one weight.

    data: (out, in / 2) uint8, as on disk, and block_scale: (out, in / 16) float8_e4m3fn, contiguous; out is a multiple
    of TILE, as any size is that a projection of NVFP4 weights can go on from.
    words: (out, words_per_row(in)) int32 and scales: (out, words_per_row(in) / 8) int32 are written.
    """
    rows, groups = scales.shape
    assert rows % TILE == 0, f"{rows} rows are no whole tiles"
    pack_words_kernel[triton.cdiv(rows, PACKED_ROWS), triton.cdiv(groups, PACKED_GROUPS)](
        data, block_scale.view(torch.uint8), words, scales, rows, block_scale.shape[1], groups, PACKED_ROWS,
        PACKED_GROUPS,
    )  # fmt: skip


@triton.jit
def word_row(row, row_size):
    """Where a row begins in its weight's words; `word_column` says how far from there a word of it lies."""
    return tile_row(row, row_size, 16)


@triton.jit
def word_column(word):
    return tile_column(word, 16)


@triton.jit
def scale_row(row, row_size):
    """As `word_row`, of the scales. row_size: of the words."""
    return row // 16 * (row_size * 2) + row % 8 * 4 + row % 16 // 8


@triton.jit
def scale_column(group):
    return group // 2 * 32 + group % 2 * 2


@triton.jit
def pack_words_kernel(
    data, block_scale, words, scales, num_rows, num_blocks, num_groups, ROWS: tl.constexpr, GROUPS: tl.constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    group = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[None, :]
    in_group = (row < num_rows) & (group < num_groups)
    packed = tl.zeros((ROWS, GROUPS), tl.int32)
    for block in tl.static_range(4):
        code = tl.load(
            block_scale + row * num_blocks + group * 4 + block,
            mask=in_group & (group * 4 + block < num_blocks),
            other=0,
        )
        scale = _scale_byte(code.to(tl.int32))
        half = scale << 4 if block % 2 == 0 else (scale >> 4) | ((scale & 0xF) << 12)
        packed |= half << (16 * (block // 2))
    tl.store(scales + scale_row(row, num_groups * 8) + scale_column(group), packed, mask=in_group)

    column = tl.program_id(1) * GROUPS * 8 + tl.arange(0, GROUPS * 8)[None, :]  # of words
    in_row = (row < num_rows) & (column < num_groups * 8)
    word = tl.zeros((ROWS, GROUPS * 8), tl.int32)
    for j in tl.static_range(8):
        source = column // 8 * 64 + j * 8 + column % 8
        has_source = in_row & (source < num_blocks * 16)
        pair = tl.load(data + row * (num_blocks * 8) + source // 2, mask=has_source, other=0).to(tl.int32)
        scale = tl.load(block_scale + row * num_blocks + source // 16, mask=has_source, other=0).to(tl.int32)
        code = (pair >> (source % 2 * 4)) & 0xF
        code = tl.where((scale & 0x7F) == 0, 0, code ^ ((scale & 0x80) >> 4))
        if j % 4 == 0:
            half = ((code & 8) << 12) | ((code & 7) << 6)
        elif j % 4 == 1:
            half = ((code & 8) << 9) | ((code & 7) << 3)
        elif j % 4 == 2:
            half = ((code & 8) << 11) | (code & 7)
        else:
            half = ((code & 8) << 10) | ((code & 7) << 9)
        word |= half << (16 * (j // 4))
    tl.store(words + word_row(row, num_groups * 8) + word_column(column), word, mask=in_row)


@triton.jit
def _scale_byte(e4m3):
    """The byte of an e4m3 scale's magnitude: that of 1 is 0xB0. A NaN's makes a NaN."""
    exponent, mantissa = (e4m3 >> 3) & 0xF, e4m3 & 7
    # A subnormal magnitude, mantissa / 8 * 2^-6, brought to a leading one: shifted by one, two or three.
    shift = tl.where(mantissa >= 4, 1, tl.where(mantissa >= 2, 2, 3))
    normal = ((exponent + 15) << 3) | mantissa
    subnormal = ((16 - shift) << 3) | ((mantissa << shift) & 7)
    byte = tl.where(exponent == 0, subnormal, normal)
    byte = tl.where(mantissa + exponent == 0, 0, byte)
    return tl.where((e4m3 & 0x7F) == 0x7F, 0xFF, byte)


@triton.jit
def code_bits(word, J: tl.constexpr):
    """Code J of each word, as the bits of a float32 that is the code's value times 2^-126; int32."""
    half = word << 16 if J < 4 else word
    if J % 4 == 0:
        bits = half & -0x7E400000  # 0x81C00000
    elif J % 4 == 1:
        bits = (half << 3) & -0x7E400000
    elif J % 4 == 2:
        bits = ((half << 1) & -0x80000000) | ((half << 6) & 0x01C00000)
    else:
        bits = ((half << 2) & -0x80000000) | ((half >> 3) & 0x01C00000)
    return bits


@triton.jit
def scale_bits(scales, BLOCK: tl.constexpr):
    """Scale BLOCK of each group's word, as the bits of a float32 that is the scale times 2^119; int32."""
    if BLOCK == 0:
        bits = (scales << 16) & 0x0FF00000
    elif BLOCK == 1:
        bits = ((scales << 24) & 0x0F000000) | ((scales << 8) & 0x00F00000)
    elif BLOCK == 2:
        bits = scales & 0x0FF00000
    else:
        bits = ((scales << 8) & 0x0F000000) | ((scales >> 8) & 0x00F00000)
    return bits | 0x70000000


@triton.jit
def per_word(scales, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """What belongs to a group, (ROWS, GROUPS), repeated for each of its words: (ROWS, 8 * GROUPS)."""
    return tl.reshape(tl.broadcast_to(scales[:, :, None], (ROWS, GROUPS, 8)), (ROWS, GROUPS * 8))


@triton.jit
def decode_words(words, scales, ASM: tl.constexpr):
    """Eight bfloat16 tiles of a tile of words: e2m1 times e4m3 times 2^-7; tile j holds columns 8 j + w of each group.

    words: int32; scales: of the same shape, `per_word`. ASM: two words at a time, in packed arithmetic; same values.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, s, t, m, z, c, e;
            mov.b32 z, 0x80008000;
            mov.b32 m, 0x81C081C0;
            mov.b32 c, 0x0FF00FF0;
            mov.b32 e, 0x70007000;
            prmt.b32 a, $8, $9, 0x5410;
            prmt.b32 b, $8, $9, 0x7632;
            prmt.b32 t, $10, $11, 0x5410;
            lop3.b32 s, t, c, e, 0xEA;
            and.b32 $0, a, m;
            fma.rn.bf16x2 $0, $0, s, z;
            shl.b32 $1, a, 3;
            and.b32 $1, $1, m;
            fma.rn.bf16x2 $1, $1, s, z;
            prmt.b32 t, t, t, 0x2301;
            lop3.b32 s, t, c, e, 0xEA;
            shl.b32 $2, a, 1;
            and.b32 $2, $2, z;
            shl.b32 t, a, 6;
            lop3.b32 $2, t, 0x01C001C0, $2, 0xEA;
            fma.rn.bf16x2 $2, $2, s, z;
            shr.b32 $3, a, 3;
            shl.b32 t, a, 2;
            lop3.b32 $3, t, $3, z, 0xE4;
            and.b32 $3, $3, m;
            fma.rn.bf16x2 $3, $3, s, z;
            prmt.b32 t, $10, $11, 0x7632;
            lop3.b32 s, t, c, e, 0xEA;
            and.b32 $4, b, m;
            fma.rn.bf16x2 $4, $4, s, z;
            shl.b32 $5, b, 3;
            and.b32 $5, $5, m;
            fma.rn.bf16x2 $5, $5, s, z;
            prmt.b32 t, t, t, 0x2301;
            lop3.b32 s, t, c, e, 0xEA;
            shl.b32 $6, b, 1;
            and.b32 $6, $6, z;
            shl.b32 t, b, 6;
            lop3.b32 $6, t, 0x01C001C0, $6, 0xEA;
            fma.rn.bf16x2 $6, $6, s, z;
            shr.b32 $7, b, 3;
            shl.b32 t, b, 2;
            lop3.b32 $7, t, $7, z, 0xE4;
            and.b32 $7, $7, m;
            fma.rn.bf16x2 $7, $7, s, z;
            }
            """,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
            [words, scales],
            dtype=(
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
            ),
            is_pure=True,
            pack=2,
        )
    else:
        return (
            _weight(words, scales, 0),
            _weight(words, scales, 1),
            _weight(words, scales, 2),
            _weight(words, scales, 3),
            _weight(words, scales, 4),
            _weight(words, scales, 5),
            _weight(words, scales, 6),
            _weight(words, scales, 7),
        )


@triton.jit
def _weight(words, scales, J: tl.constexpr):
    code = code_bits(words, J).to(tl.float32, bitcast=True)
    return (code * scale_bits(scales, J // 2).to(tl.float32, bitcast=True)).to(tl.bfloat16)
