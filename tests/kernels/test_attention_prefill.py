"""Prefill attention on small shapes: tiles, grouped heads, earlier context, padding, and every cut of a prompt."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hemiola.kernels.attention_prefill import PrefillTiling, attention_prefill
from hemiola.ops.paged_attention import paged_attention_prefill
from tests.support.numerics import generator, randn
from tests.support.paged import Paged, attend
from tests.support.separation import assert_separates

TILING = PrefillTiling(block_m=32, block_n=16, num_warps=4, num_stages=1)
E4M3 = torch.float8_e4m3fn


def starts_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


def run(q: Tensor, paged: Paged, counts: list[int], scale: float, tiling: PrefillTiling = TILING) -> Tensor:
    caches = paged.k_cache, paged.v_cache, paged.table
    return attention_prefill(q, *caches, starts_of(counts), paged.lens, scale, 0.5, 2.0, max(counts), tiling=tiling)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(16, 1, 32, 16), (4, 2, 64, 16), (10, 2, 48, 8), (3, 3, 80, 32), (6, 2, 128, 4)],
)
def test_equals_float64(heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    """First chunks, later chunks and one token, with lengths around the tiles' edges."""
    g = generator(heads * head_dim)
    lengths, counts = [1, 17, 40, 33], [1, 17, 7, 1]
    paged = Paged(g, lengths, kv_heads, head_dim, dtype, block_size=block_size)
    q = (2 * randn(g, sum(counts), heads, head_dim)).bfloat16()
    scale = head_dim**-0.5
    out = run(q, paged, counts, scale)
    caches = paged.k_cache, paged.v_cache, paged.table
    reference = paged_attention_prefill(q, *caches, starts_of(counts), paged.lens, scale, 0.5, 2.0)
    k_scale, v_scale = (0.5, 2.0) if dtype == E4M3 else (1.0, 1.0)
    pieces = q.split(counts)

    def exact(k_scale: float = k_scale, v_scale: float = v_scale, **defect: object) -> Tensor:
        rows = zip(pieces, paged.keys, paged.values, strict=True)
        return torch.cat([attend(x, k * k_scale, v * v_scale, scale, **defect) for x, k, v in rows])

    defects = {"scores' scale": exact(k_scale=1.2 * k_scale), "values' scale": exact(v_scale=1.2 * v_scale)}
    if kv_heads not in (1, heads):
        defects["heads in turns"] = exact(interleaved=True)
    assert_separates("all", out, reference, exact(), defects)
    third = (pieces[2], paged.keys[2] * k_scale, paged.values[2] * v_scale, scale)
    ours, theirs, right = out.split(counts)[2], reference.split(counts)[2], attend(*third)
    future = {"one token too far": attend(pieces[2][:-1], *third[1:])}
    assert_separates("all but its last token", ours[:-1], theirs[:-1], right[:-1], future)
    hidden = {"last token": slice(39, 40), "first": slice(0, 1), "a tile": slice(16, 32)}
    wrong = {name: attend(*third, hide=where)[-1:] for name, where in hidden.items()}
    assert_separates("last token", ours[-1:], theirs[-1:], right[-1:], wrong)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_every_cut_of_a_prompt_gives_the_same_bits(dtype: torch.dtype) -> None:
    g = generator(1)
    paged = Paged(g, [40], 2, 32, dtype)
    q = randn(g, 40, 8, 32, dtype=torch.bfloat16)
    whole = run(q, paged, [40], 0.2)
    for cuts in ([13], [1], [39], [16, 32], [5, 6, 30]):
        for low, high in zip([0, *cuts], [*cuts, 40], strict=True):
            paged.lens = torch.tensor([high], dtype=torch.int32)
            assert torch.equal(run(q[low:high], paged, [high - low], 0.2), whole[low:high])


def test_a_row_alone_equals_the_row_in_a_batch() -> None:
    g = generator(2)
    lengths, counts = [5, 17, 30, 8], [5, 4, 30, 1]
    paged = Paged(g, lengths, 2, 32)
    q = randn(g, sum(counts), 4, 32, dtype=torch.bfloat16)
    together = run(q, paged, counts, 0.2).split(counts)
    table, lens = paged.table, paged.lens
    for row, piece in enumerate(q.split(counts)):
        paged.table, paged.lens = table[row : row + 1], lens[row : row + 1]
        assert torch.equal(run(piece, paged, [counts[row]], 0.2), together[row])


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_padded_rows_and_tokens_that_no_row_owns_return_zeros(dtype: torch.dtype) -> None:
    g = generator(3)
    paged = Paged(g, [6, 0, 4], 2, 32, dtype)
    q = randn(g, 90, 4, 32, dtype=torch.bfloat16)
    counts = [2, 3, 0]
    out = run(q, paged, counts, 0.2)
    assert out[2:].eq(0).all()
    assert out[:2].ne(0).any()
    assert not out.isnan().any()
    paged.lens = torch.zeros(3, dtype=torch.int32)
    assert run(q, paged, [0, 0, 0], 0.2).eq(0).all()


def test_strided_queries() -> None:
    g = generator(4)
    paged = Paged(g, [9], 2, 32)
    view = randn(g, 9, 3, 4, 32, dtype=torch.bfloat16)[:, 1]
    assert torch.equal(run(view, paged, [9], 0.2), run(view.contiguous(), paged, [9], 0.2))
