"""NVFP4: 4-bit e2m1 codes, one e4m3 scale per 16 inputs, one fp32 scale per tensor, as in ModelOpt exports.

value[o, i] = e2m1(code[o, i]) * float(block_scale[o, i // 16]) * scale. The first product is exact in bf16 (at most six
significant bits); `scale` multiplies and is applied in fp32, last. Two codes a byte: column 2b in the low nibble of
byte b, column 2b + 1 in the high nibble. Bit 3 of a code is the sign; code 8 is -0. Owns packing and rounding; knows
nothing of files, names or layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hemiola.errors import CheckpointError
from hemiola.formats.quant import fp8

BLOCK = 16
MAX = 6.0

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)])
"""(16,) float32: the value of each code."""

_PAIRS = torch.stack((VALUES.repeat(16), VALUES.repeat_interleave(16)), dim=1)
"""(256, 2) float32: the values of a byte's low and high nibble."""

# Midpoints between neighbouring magnitudes. A tie goes to the even code, so every second midpoint belongs to the
# interval above it and its bound is the float just below.
_BOUNDS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_BOUNDS[1::2] = torch.nextafter(_BOUNDS[1::2], torch.zeros(()))

_SMALLEST_BLOCK_SCALE = 2.0**-9

FOUR_OVER_SIX_RANGE = MAX * 256.0
"""A weight's amax over its tensor scale under `encode_four_over_six`."""


class Encoded(NamedTuple):
    """One quantised weight: packed uint8 (out, in / 2), block_scale float8_e4m3fn (out, in / 16), scale (fp32)."""

    packed: Tensor
    block_scale: Tensor
    scale: float


def pack(codes: Tensor) -> Tensor:
    """Two codes a byte, low nibble first. codes: (out, in) uint8 below 16, in even. Returns (out, in / 2) uint8."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """Inverse of pack. packed: (out, in / 2) uint8. Returns (out, in) uint8 codes."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)


def round_to_codes(v: Tensor) -> Tensor:
    """Nearest e2m1 code of each value, ties to even, saturating at 6; -0 becomes code 8.

    v: float32, any shape, no NaN. Returns uint8 codes of v's shape, unpacked.
    """
    magnitude = torch.bucketize(v.abs(), _BOUNDS.to(v.device))
    return magnitude.to(torch.uint8) | torch.signbit(v).to(torch.uint8) << 3


def decode_unscaled(packed: Tensor, block_scale: Tensor) -> Tensor:
    """e2m1 value times block scale, without the tensor's scale: (out, in) float32, each value exact in bf16.

    packed: (out, in / 2) uint8. block_scale: (out, in / 16) float8_e4m3fn.
    """
    rows, blocks = block_scale.shape
    values = torch.nn.functional.embedding(packed.int(), _PAIRS.to(packed.device))
    return (values.view(rows, blocks, BLOCK) * block_scale.float()[..., None]).view(rows, blocks * BLOCK)


def decode(packed: Tensor, block_scale: Tensor, scale: float) -> Tensor:
    """The weight's values, (out, in) float32, rounded once. Arguments as in decode_unscaled and Encoded."""
    return decode_unscaled(packed, block_scale) * scale


def encode(w: Tensor, scale: float | None = None) -> Encoded:
    """Quantise a weight: tensor scale amax / (6 * 448) unless given, block scale e4m3(amax of 16 / 6 / scale).

    w: (out, in), in a multiple of 16, any float dtype; computed in fp32. An all-zero block gets block scale 0 and zero
    codes; a block too small for e4m3 gets the smallest block scale there is, so that it is not lost; an all-zero weight
    gets scale 1.0. With a `scale` that is too small the block scales saturate at 448.

    Raises: CheckpointError when in is not a multiple of 16 or w holds NaN or infinity.
    """
    blocks, amax = _blocks(w)
    scale = scale or float(amax.max() / (MAX * fp8.MAX)) or 1.0
    codes, block_scale, _ = _quantize_blocks(blocks, amax, MAX, scale)
    return Encoded(pack(codes.view(w.shape)), block_scale, scale)


def encode_four_over_six(w: Tensor, scale: float | None = None) -> Encoded:
    """Quantise a weight, mapping each block's largest magnitude to 6 or to 4, whichever has the smaller squared error.

    Codes near 6 lie far apart; a block that maps to 4 leaves them unused. Unless given, the tensor scale is
    amax / (6 * 256), which leaves room for the larger block scales of the blocks that map to 4 (up to 384 of 448).
    Otherwise as `encode`, to which it is the same for every reader.

    Source: arXiv 2512.02010 (Four Over Six).
    """
    blocks, amax = _blocks(w)
    scale = scale or float(amax.max() / FOUR_OVER_SIX_RANGE) or 1.0
    codes, block_scale, error = _quantize_blocks(blocks, amax, MAX, scale)
    other_codes, other_scale, other_error = _quantize_blocks(blocks, amax, 4.0, scale)
    is_better = other_error < error
    codes = torch.where(is_better[..., None], other_codes, codes)
    # Selected as bytes: not every torch version selects among e4m3.
    scales = torch.where(is_better, other_scale.view(torch.uint8), block_scale.view(torch.uint8))
    return Encoded(pack(codes.view(w.shape)), scales.view(torch.float8_e4m3fn), scale)


def _blocks(w: Tensor) -> tuple[Tensor, Tensor]:
    """w in blocks, (out, in / 16, 16) float32, and the largest magnitude of each, (out, in / 16), all finite."""
    rows, columns = w.shape
    if columns % BLOCK:
        raise CheckpointError(
            "NVFP4 needs an input size in whole blocks",
            found=f"{columns} inputs",
            expected=f"a multiple of {BLOCK}",
            remedy="Keep this weight in BF16 or FP8.",
        )
    blocks = w.float().view(rows, columns // BLOCK, BLOCK)
    amax = blocks.abs().amax(-1)
    if not torch.isfinite(amax.max()):
        raise CheckpointError(
            "cannot quantise a weight that holds NaN or infinity", remedy="Repair the source weights."
        )
    return blocks, amax


def _quantize_blocks(blocks: Tensor, amax: Tensor, largest: float, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Each block scaled so that its amax becomes `largest`: codes (out, in / 16, 16), block_scale, squared error."""
    divisor = torch.tensor(scale, dtype=torch.float32, device=blocks.device)
    # The lower bound is for blocks that hold something; an empty block keeps scale 0.
    floor = torch.where(amax > 0, _SMALLEST_BLOCK_SCALE, 0.0)
    block_scale = (amax / largest / divisor).maximum(floor).clamp(max=fp8.MAX).to(torch.float8_e4m3fn)
    step = torch.where(amax > 0, block_scale.float() * divisor, 1.0)[..., None]
    codes = round_to_codes(blocks / step)
    values = VALUES.to(blocks.device)[codes.int()] * step
    return codes, block_scale, (values - blocks).square().sum(-1)
