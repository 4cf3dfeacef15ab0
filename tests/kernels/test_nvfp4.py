"""The packed order of NVFP4 weights: what kernels decode is what is on disk, code by code and scale by scale."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from hemiola.formats.weight import Scheme, Weight
from hemiola.kernels import nvfp4
from tests.support.numerics import generator
from tests.support.weights import random_weight, unscaled


@triton.jit
def decode_all(packed, scales, lo_ptr, hi_ptr, ROWS: tl.constexpr, BYTES: tl.constexpr):
    rows = tl.arange(0, ROWS)[:, None]
    tile = rows * BYTES + tl.arange(0, BYTES)[None, :]
    words = tl.load(scales + rows * (BYTES // 16) + tl.arange(0, BYTES // 16)[None, :])
    lo_scale, hi_scale = nvfp4.block_scales(words)
    lo_scale = nvfp4.per_byte(lo_scale, ROWS, BYTES // 16)
    hi_scale = nvfp4.per_byte(hi_scale, ROWS, BYTES // 16)
    lo, hi = nvfp4.decode(tl.load(packed + tile), lo_scale, hi_scale, False)
    tl.store(lo_ptr + tile, lo)
    tl.store(hi_ptr + tile, hi)


def decoded(packed: Tensor, scales: Tensor) -> Tensor:
    """(rows, padded columns) float64, columns in their order, as a kernel sees them; with the remainder."""
    rows, num_bytes = packed.shape
    lo, hi = (torch.full((rows, num_bytes), torch.nan, dtype=torch.bfloat16) for _ in range(2))
    decode_all[(1,)](packed, scales, lo, hi, ROWS=rows, BYTES=num_bytes)
    groups = torch.stack((lo.view(rows, -1, 32), hi.view(rows, -1, 32)), dim=2)
    return groups.reshape(rows, 2 * num_bytes).double() * nvfp4.REMAINDER


def weight_of(in_size: int, seed: int) -> Weight:
    """Every e4m3 code but NaN among the scales, negative and subnormal ones, too."""
    g = generator(seed)
    weight = random_weight(g, "w", Scheme.NVFP4, 16, in_size)
    codes = torch.randint(0, 0x7F, (16, in_size // 16), generator=g)
    codes += 0x80 * torch.randint(0, 2, codes.shape, generator=g)
    return dataclasses.replace(weight, block_scale=codes.to(torch.uint8).view(torch.float8_e4m3fn))


def unpadded(result: Tensor, in_size: int) -> Tensor:
    assert torch.count_nonzero(result[:, in_size:]) == 0
    return result[:, :in_size]


@pytest.mark.parametrize("in_size", [48, 64, 80, 112, 128, 240, 256])
def test_decoding_gives_back_what_was_packed(in_size: int) -> None:
    weight = weight_of(in_size, seed=in_size)
    assert weight.block_scale is not None
    packed, scales = nvfp4.pack_codes(weight.data), nvfp4.pack_scales(weight.block_scale)
    columns = nvfp4.padded_columns(in_size)
    assert columns % 64 == 0
    assert columns - in_size < 64
    assert (packed.shape, scales.shape) == ((16, columns // 2), (16, columns // 32))
    if columns.bit_count() == 1:  # a kernel's tile is a power of two
        assert torch.equal(unpadded(decoded(packed, scales), in_size), unscaled(weight))
    for group in range(0, columns, 64):
        part = decoded(packed[:, group // 2 :][:, :32].contiguous(), scales[:, group // 32 :][:, :2].contiguous())
        expected = unscaled(weight)[:, group : group + 64]
        assert torch.equal(unpadded(part, expected.shape[1]), expected)


def test_each_code_and_each_scale() -> None:
    """All 16 codes with all 254 scales that are numbers."""
    codes = torch.arange(16, dtype=torch.uint8)
    data = (codes[0::2] | codes[1::2] << 4).repeat(16, 16)
    numbers = [code for code in range(256) if code & 0x7F != 0x7F]
    scales = torch.tensor([*numbers, 0, 0], dtype=torch.uint8).view(torch.float8_e4m3fn).view(16, 16)
    weight = Weight("w", (16, 256), Scheme.NVFP4, data, scales, 1.0)
    assert torch.equal(decoded(nvfp4.pack_codes(data), nvfp4.pack_scales(scales)), unscaled(weight))


def test_a_bank_is_packed_like_its_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the pieces in which it is packed."""
    experts = [weight_of(80, seed) for seed in range(3)]
    scales = [expert.block_scale for expert in experts if expert.block_scale is not None]
    one_by_one = torch.stack([nvfp4.pack_codes(expert.data) for expert in experts])
    monkeypatch.setattr(nvfp4, "_CHUNK_BYTES", 700)
    assert torch.equal(nvfp4.pack_codes(torch.stack([expert.data for expert in experts])), one_by_one)
    assert torch.equal(nvfp4.pack_scales(torch.stack(scales)), torch.stack([nvfp4.pack_scales(s) for s in scales]))


def test_order_of_a_group() -> None:
    """The layout that the module's text states, nibble by nibble."""
    for column in range(64):
        data = torch.zeros(1, 32, dtype=torch.uint8)
        data[0, column // 2] = 0xF << 4 * (column % 2)
        expected = torch.zeros(1, 32, dtype=torch.uint8)
        expected[0, column % 32] = 0xF0 if column < 32 else 0x0F
        assert torch.equal(nvfp4.pack_codes(data), expected)
