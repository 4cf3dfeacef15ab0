"""Decode attention on small shapes: splits, grouped heads, both cache types, padding, and what a row depends on."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hemiola.kernels.attention_decode import CombineTile, DecodeTiling, attention_decode, combine_tile
from hemiola.ops.paged_attention import paged_attention_decode
from tests.support.numerics import assert_ledger, bf16, generator, randn
from tests.support.paged import Paged, attend
from tests.support.separation import assert_separates

SMALL = DecodeTiling(block_n=16, min_tiles=1)
E4M3 = torch.float8_e4m3fn


def run(q: Tensor, paged: Paged, scale: float, *, rows: slice = slice(None), **options: object) -> Tensor:
    scales = 0.5, 2.0
    return attention_decode(
        q[rows], paged.k_cache, paged.v_cache, paged.table[rows], paged.lens[rows], scale, *scales, **options
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(16, 1, 32, 16), (4, 2, 64, 16), (10, 2, 48, 8), (3, 3, 80, 32), (6, 2, 128, 4)],
)
@pytest.mark.parametrize("tiling", [SMALL, DecodeTiling(block_n=64)], ids=["splits", "one"])
def test_equals_float64(
    heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, tiling: DecodeTiling
) -> None:
    g = generator(heads * head_dim)
    lengths = [1, 15, 16, 17, 63, 70]
    paged = Paged(g, lengths, kv_heads, head_dim, dtype, block_size=block_size)
    q = (2 * randn(g, len(lengths), heads, head_dim)).bfloat16()
    scale = head_dim**-0.5
    out = run(q, paged, scale, tiling=tiling)
    reference = paged_attention_decode(q, paged.k_cache, paged.v_cache, paged.table, paged.lens, scale, 0.5, 2.0)
    k_scale, v_scale = (0.5, 2.0) if dtype == E4M3 else (1.0, 1.0)

    def exact(k_scale: float = k_scale, v_scale: float = v_scale, **defect: object) -> Tensor:
        rows = zip(q, paged.keys, paged.values, strict=True)
        return torch.cat([attend(x[None], k * k_scale, v * v_scale, scale, **defect) for x, k, v in rows])

    defects = {"scores' scale": exact(k_scale=1.2 * k_scale), "values' scale": exact(v_scale=1.2 * v_scale)}
    if kv_heads not in (1, heads):
        defects["heads in turns"] = exact(interleaved=True)
    assert_separates("all", out, reference, exact(), defects)
    longest = len(lengths) - 1
    last = (q[longest:], paged.keys[longest] * k_scale, paged.values[longest] * v_scale, scale)
    hidden = {"last token": slice(69, 70), "first": slice(0, 1), "a tile": slice(16, 32)}
    wrong = {name: attend(*last, hide=where) for name, where in hidden.items()}
    assert_separates("longest", out[longest:], reference[longest:], attend(*last), wrong)


@pytest.mark.parametrize("length", [16 * 33, 16 * 130 - 5, 16 * 257 + 1], ids=str)
def test_many_splits(length: int) -> None:
    """A tile of tokens each: combined in slices of a head, and, past 256, in two steps."""
    g = generator(8)
    paged = Paged(g, [length], 1, 80, block_size=16)
    q = (2 * randn(g, 1, 5, 80)).bfloat16()
    out = run(q, paged, 0.1, tiling=SMALL)
    reference = paged_attention_decode(q, paged.k_cache, paged.v_cache, paged.table, paged.lens, 0.1, 1.0, 1.0)
    keys, values = paged.keys[0], paged.values[0]
    # Each takes so many tokens that the result moves.
    taken = {"first splits": slice(0, length // 8), "last": slice(length - length // 8, length)}
    defects = {name: attend(q, keys, values, 0.1, hide=where) for name, where in taken.items()}
    assert_separates("all", out, reference, attend(q, keys, values, 0.1), defects)


def test_the_invariant_combination_in_steps() -> None:
    """More splits than it loads at once; in a wider table still the same bits."""
    g = generator(9)
    paged = Paged(g, [35 * 1024 - 100], 1, 32, block_size=1024)
    q = (2 * randn(g, 1, 2, 32)).bfloat16()
    options = {"invariant": True, "tiling": DecodeTiling(block_n=1024)}
    out = run(q, paged, 0.2, **options)
    reference = paged_attention_decode(q, paged.k_cache, paged.v_cache, paged.table, paged.lens, 0.2, 1.0, 1.0)
    keys, values = paged.keys[0], paged.values[0]
    defects = {"last split": attend(q, keys, values, 0.2, hide=slice(33 * 1024, len(keys)))}
    assert_separates("all", out, reference, attend(q, keys, values, 0.2), defects)
    paged.table = torch.cat([paged.table, torch.full((1, 99), -1, dtype=torch.int32)], 1)
    assert torch.equal(run(q, paged, 0.2, **options), out)


def test_programs_of_the_combination() -> None:
    """One row: all its splits at once, in slices. Many rows with few splits: a few programs each."""
    assert combine_tile(132, 32, 128) == CombineTile(256, 1, 32)
    assert combine_tile(16, 32, 128) == CombineTile(16, 1, 128)
    assert combine_tile(2, 32, 128) == CombineTile(2, 8, 128)
    assert combine_tile(2, 3, 80) == CombineTile(2, 4, 128)
    assert combine_tile(5, 32, 128, invariant=True) == combine_tile(900, 32, 128, invariant=True)
    for splits in range(2, 1500):
        tile = combine_tile(splits, 32, 128)
        assert tile.splits * tile.heads * tile.dims == 1024 * tile.num_warps or tile.num_warps == 4


def test_ledger() -> None:
    """One tile, so that the weights are those of the whole row: unnormalised and rounded for the product only."""
    g = generator(7)
    paged = Paged(g, [20] * 16, 2, 32)
    q = randn(g, 16, 32, 32, dtype=torch.bfloat16)
    scale = 32**-0.5
    out = run(q, paged, scale, tiling=DecodeTiling(block_n=64))
    keys, values = (torch.stack(t).repeat_interleave(16, 2) for t in (paged.keys, paged.values))
    exact = torch.einsum("rhd,rjhd->rhj", q.double(), keys)

    def attended(scores: Tensor, rounded: str = "numerator") -> Tensor:
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        total = weights.sum(-1, keepdim=True)
        if rounded == "normalised":
            return torch.einsum("rhj,rjhd->rhd", bf16(weights / total), values)
        if rounded == "both":
            total = bf16(weights).sum(-1, keepdim=True)
        if rounded != "nothing":
            weights = bf16(weights)
        return torch.einsum("rhj,rjhd->rhd", weights, values) / total

    assert_ledger(
        out,
        attended(exact * scale),
        {
            "rounded scores": attended(bf16(exact) * scale),
            "weights left in float32": attended(exact * scale, "nothing"),
            "normalised weights rounded": attended(exact * scale, "normalised"),
            "the sum taken of rounded weights": attended(exact * scale, "both"),
        },
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
@pytest.mark.parametrize("invariant", [False, True])
def test_padded_rows_return_zeros_and_read_nothing(dtype: torch.dtype, invariant: bool) -> None:
    g = generator(2)
    paged = Paged(g, [0, 33, 0], 2, 32, dtype, spare_columns=70)
    q = randn(g, 3, 4, 32, dtype=torch.bfloat16)
    out = run(q, paged, 0.2, invariant=invariant, tiling=SMALL)
    assert out[[0, 2]].eq(0).all()
    assert not out.isnan().any()
    alone = run(q[1:2], Paged(g, [1], 2, 32, dtype), 0.2)
    assert not alone.isnan().any()


def test_nan_in_an_e4m3_cache_is_seen() -> None:
    g = generator(3)
    paged = Paged(g, [20], 1, 32, E4M3)
    paged.v_cache[paged.table[0, 1], 3, 0, 5] = math.nan
    out = run(randn(g, 1, 4, 32, dtype=torch.bfloat16), paged, 0.2)
    assert out[..., 5].isnan().all()
    assert not out[..., :5].isnan().any()


def test_invariant_rows_depend_on_themselves_alone() -> None:
    """Alone, among others, and with a wider table: the same bits, over a boundary of splits."""
    g = generator(4)
    paged = Paged(g, [5, 1100, 0, 1024, 60], 1, 32, block_size=64)
    q = randn(g, 5, 4, 32, dtype=torch.bfloat16)
    options = {"invariant": True, "tiling": DecodeTiling(block_n=128)}
    together = run(q, paged, 0.2, **options)
    wide = torch.cat([paged.table, torch.full((5, 40), -1, dtype=torch.int32)], 1)
    paged.table = wide
    assert torch.equal(run(q, paged, 0.2, **options), together)
    for row in (0, 1, 3, 4):
        assert torch.equal(run(q, paged, 0.2, rows=slice(row, row + 1), **options)[0], together[row])
    paged.table = wide[:, :16]
    assert torch.equal(run(q, paged, 0.2, rows=slice(3, 4), **options)[0], together[3]), "one split, no combination"


def test_strided_queries_and_no_rows() -> None:
    g = generator(5)
    paged = Paged(g, [9, 40], 2, 32)
    wide = randn(g, 2, 3, 4, 32, dtype=torch.bfloat16)
    view = wide[:, 1]
    assert torch.equal(run(view, paged, 0.2), run(view.contiguous(), paged, 0.2))
    assert run(view, paged, 0.2, rows=slice(0, 0)).shape == (0, 4, 32)
