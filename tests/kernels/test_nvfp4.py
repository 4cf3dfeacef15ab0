"""Words of NVFP4 codes: what kernels decode is what is on disk, code by code and scale by scale."""

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

ROWS = 16


@triton.jit
def decode_all(
    words, scales, tiles_ptr, floats_ptr, ROWS: tl.constexpr, WORDS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    row = tl.arange(0, ROWS)[:, None]
    word_at, group = tl.arange(0, WORDS)[None, :], tl.arange(0, WORDS // 8)[None, :]
    offset = row * WORDS + word_at
    word = tl.load(words + nvfp4.word_row(row, SIZE) + nvfp4.word_column(word_at), mask=word_at < SIZE)
    scales += nvfp4.scale_row(row, SIZE) + nvfp4.scale_column(group)
    scale = tl.load(scales, mask=group < SIZE // 8)
    tiles = nvfp4.decode_words(word, nvfp4.per_word(scale, ROWS, WORDS // 8), False)
    for j in tl.static_range(8):
        tl.store(tiles_ptr + j * ROWS * WORDS + offset, tiles[j])
        code = nvfp4.code_bits(word, j).to(tl.float32, bitcast=True) * 18446744073709551616.0
        factor = nvfp4.scale_bits(scale, j // 2).to(tl.float32, bitcast=True) / 18446744073709551616.0
        tl.store(floats_ptr + j * ROWS * WORDS + offset, code * nvfp4.per_word(factor, ROWS, WORDS // 8))


def in_order(tiles: Tensor) -> Tensor:
    """(8, rows, words) to (rows, columns): tile j holds columns 8 j + w of each group."""
    _, rows, words = tiles.shape
    return tiles.view(8, rows, words // 8, 8).permute(1, 2, 0, 3).reshape(rows, words * 8)


def decoded(weight: Weight) -> tuple[Tensor, Tensor]:
    """(rows, padded columns) float64 twice: by the tiles for products, and by the numbers for sums."""
    assert weight.block_scale is not None, "NVFP4 has block scales"
    size = nvfp4.words_per_row(weight.shape[1])
    words, scales = (torch.full((ROWS, n), 0x55555555, dtype=torch.int32) for n in (size, size // 8))
    nvfp4.pack_words(weight.data, weight.block_scale, words, scales)
    width = triton.next_power_of_2(size)
    tiles = torch.full((8, ROWS, width), torch.nan, dtype=torch.bfloat16)
    floats = torch.full((8, ROWS, width), torch.nan)
    decode_all[(1,)](words, scales, tiles, floats, ROWS=ROWS, WORDS=width, SIZE=size)
    first, second = (in_order(t)[:, : size * 8].double() * nvfp4.REMAINDER for t in (tiles, floats))
    return first, second


def weight_of(in_size: int) -> Weight:
    """Every e4m3 code but NaN among the scales, negative, subnormal and zero ones, too."""
    g = generator(in_size)
    weight = random_weight(g, "w", Scheme.NVFP4, ROWS, in_size)
    codes = torch.arange(ROWS * in_size // 16).view(ROWS, -1) * 37 % 127
    codes += 0x80 * torch.randint(0, 2, codes.shape, generator=g)
    return dataclasses.replace(weight, block_scale=codes.to(torch.uint8).view(torch.float8_e4m3fn))


@pytest.mark.parametrize("in_size", [16, 48, 64, 80, 240, 512])
def test_decoding_gives_back_what_was_packed(in_size: int) -> None:
    weight = weight_of(in_size)
    for result in decoded(weight):
        assert torch.equal(result[:, :in_size], unscaled(weight))
        assert torch.count_nonzero(result[:, in_size:]) == 0


def test_a_scale_that_is_not_a_number_stays_one() -> None:
    weight = weight_of(64)
    assert weight.block_scale is not None, "NVFP4 has block scales"
    weight.block_scale.view(torch.uint8)[3, 1] = 0x7F
    for result in decoded(weight):
        assert result[3, 16:32].isnan().all()
        assert result.isnan().sum() == 16
