"""Paged attention against brute force: grouped heads, chunks, scattered blocks, padding, fp8."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hemiola.ops.paged_attention import paged_attention_decode, paged_attention_prefill
from tests.support.numerics import assert_close, assert_ledger, bf16, generator, randn, relative_error

BLOCK_SIZE, BLOCKS, HEAD_DIM = 4, 64, 8
SCALE = HEAD_DIM**-0.5


def brute_force(q: Tensor, keys: Tensor, values: Tensor, scale: float, *, rope: bool = False) -> Tensor:
    """q: (n, Hq, D), the last n tokens; keys, values: (length, Hkv, D); all float64, one score at a time."""
    n, heads, _ = q.shape
    length, kv_heads, _ = keys.shape
    if rope:
        q, keys = rotated(q, length - n), rotated(keys, 0)
    out = torch.zeros_like(q)
    for i in range(n):
        seen = length - n + i + 1
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            scores = torch.stack([(q[i, head] * keys[j, kv_head]).sum() * scale for j in range(seen)])
            weights = torch.exp(scores - scores.max())
            out[i, head] = (weights[:, None] * values[:seen, kv_head]).sum(0) / weights.sum()
    return out


def rotated(x: Tensor, first: int) -> Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(first, first + x.shape[0], dtype=torch.float64)[:, None, None] / 10000 ** (
        torch.arange(half, dtype=torch.float64) / half
    )
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1)


class Paged:
    """Caches full of NaN but for the given requests' tokens, in scattered blocks."""

    def __init__(self, g: torch.Generator, lengths: list[int], kv_heads: int, dtype: torch.dtype) -> None:
        free = torch.randperm(BLOCKS, generator=g).int().tolist()
        self.keys = [randn(g, length, kv_heads, HEAD_DIM, dtype=dtype) for length in lengths]
        self.values = [randn(g, length, kv_heads, HEAD_DIM, dtype=dtype) for length in lengths]
        nan = torch.full((BLOCKS, BLOCK_SIZE, kv_heads, HEAD_DIM), float("nan"), dtype=dtype)
        self.k_cache, self.v_cache = nan.clone(), nan.clone()
        tables = []
        for keys, values in zip(self.keys, self.values, strict=True):
            blocks = [free.pop() for _ in range(-(-len(keys) // BLOCK_SIZE))]
            for p in range(len(keys)):
                self.k_cache[blocks[p // BLOCK_SIZE], p % BLOCK_SIZE] = keys[p]
                self.v_cache[blocks[p // BLOCK_SIZE], p % BLOCK_SIZE] = values[p]
            tables.append(blocks)
        widest = max(map(len, tables))
        self.table = torch.tensor([t + [0] * (widest - len(t)) for t in tables], dtype=torch.int32)
        self.lens = torch.tensor(lengths, dtype=torch.int32)


def starts_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (8, 2), (3, 1), (1, 1)])
def test_float32_equals_brute_force(heads: int, kv_heads: int) -> None:
    """First chunks, later chunks and one-token chunks in one batch; lengths around the block size."""
    g = generator(heads)
    lengths, counts = [1, 3, 4, 5, 17, 17, 17], [1, 3, 4, 5, 17, 6, 1]
    paged = Paged(g, lengths, kv_heads, torch.float32)
    q = randn(g, sum(counts), heads, HEAD_DIM)
    starts = starts_of(counts)
    out = paged_attention_prefill(q, paged.k_cache, paged.v_cache, paged.table, starts, paged.lens, SCALE, 7.0, 7.0)
    for row, (low, high) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
        inputs = q[low:high].double(), paged.keys[row].double(), paged.values[row].double()
        assert_close(out[low:high], brute_force(*inputs, SCALE), 1e-6)
        if lengths[row] > 1:
            assert relative_error(out[low:high], brute_force(*inputs, SCALE, rope=True)) > 1e-3
            assert relative_error(out[low:high], brute_force(*inputs, 1 / HEAD_DIM)) > 1e-3


def test_decode_equals_a_one_token_chunk() -> None:
    g = generator(1)
    paged = Paged(g, [1, 4, 5, 33], 2, torch.float32)
    q = randn(g, 4, 4, HEAD_DIM)
    caches = paged.k_cache, paged.v_cache, paged.table
    out = paged_attention_decode(q, *caches, paged.lens, SCALE, 1.0, 1.0)
    assert torch.equal(out, paged_attention_prefill(q, *caches, starts_of([1] * 4), paged.lens, SCALE, 1.0, 1.0))
    for row in range(4):
        expected = brute_force(q[row : row + 1].double(), paged.keys[row].double(), paged.values[row].double(), SCALE)
        assert_close(out[row : row + 1], expected, 1e-6)


def test_every_split_of_a_prompt_gives_the_same_rows() -> None:
    g = generator(2)
    paged = Paged(g, [40], 2, torch.float32)
    q = randn(g, 40, 4, HEAD_DIM)
    whole = brute_force(q.double(), paged.keys[0].double(), paged.values[0].double(), SCALE)
    for cuts in ([13], [1], [39], list(range(4, 40, 4))):
        for low, high in zip([0, *cuts], [*cuts, 40], strict=True):
            seen = torch.tensor([high])
            out = paged_attention_prefill(
                q[low:high], paged.k_cache, paged.v_cache, paged.table, starts_of([high - low]), seen, SCALE, 1.0, 1.0
            )
            assert_close(out, whole[low:high], 1e-6)


def test_bf16_ledger() -> None:
    """Scores, softmax and its sum in float32; the unnormalised weights rounded for the product; one rounding."""
    g = generator(3)
    paged = Paged(g, [48], 2, torch.bfloat16)
    q = randn(g, 48, 4, HEAD_DIM, dtype=torch.bfloat16)
    out = paged_attention_prefill(
        q, paged.k_cache, paged.v_cache, paged.table, starts_of([48]), paged.lens, SCALE, 1.0, 1.0
    )
    keys, values = (t[0].double().repeat_interleave(2, 1) for t in (paged.keys, paged.values))
    exact = torch.einsum("ihd,jhd->hij", q.double(), keys)
    past = torch.ones(48, 48).tril().bool()

    def attended(scores: Tensor, rounded: str = "numerator") -> Tensor:
        scores = scores.masked_fill(~past, -math.inf)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        total = weights.sum(-1, keepdim=True)
        if rounded == "normalised":
            return torch.einsum("hij,jhd->ihd", bf16(weights / total), values)
        if rounded == "both":
            total = bf16(weights).sum(-1, keepdim=True)
        if rounded != "nothing":
            weights = bf16(weights)
        return torch.einsum("hij,jhd->ihd", weights, values) / total.permute(1, 0, 2)

    assert_ledger(
        out,
        attended(exact * SCALE),
        {
            "rounded scores": attended(bf16(exact) * SCALE),
            "a rounded scaled query": attended(torch.einsum("ihd,jhd->hij", bf16(q.double() * SCALE), keys)),
            "weights left in float32": attended(exact * SCALE, "nothing"),
            "normalised weights rounded": attended(exact * SCALE, "normalised"),
            "the sum taken of rounded weights": attended(exact * SCALE, "both"),
        },
    )


@pytest.mark.parametrize("n", [127, 128, 129, 300])
def test_more_queries_than_a_tile_holds(n: int) -> None:
    g = generator(n)
    keys, values, q = randn(g, 320, 1, HEAD_DIM), randn(g, 320, 1, HEAD_DIM), randn(g, n, 2, HEAD_DIM)
    cache = [t.view(80, BLOCK_SIZE, 1, HEAD_DIM) for t in (keys, values)]
    table, lens = torch.arange(80, dtype=torch.int32)[None], torch.tensor([320])
    out = paged_attention_prefill(q, *cache, table, starts_of([n]), lens, SCALE, 1.0, 1.0)
    scores = torch.einsum("ihd,jd->hij", q.double(), keys[:, 0].double()) * SCALE
    scores = scores.masked_fill(torch.ones(n, 320).triu(320 - n + 1).bool(), -math.inf)
    assert_close(out, torch.einsum("hij,jd->ihd", scores.softmax(-1), values[:, 0].double()), 1e-5)


def test_fp8_codes_are_multiplied_by_their_own_scales() -> None:
    g = generator(4)
    paged = Paged(g, [19], 2, torch.float32)
    k8, v8 = (t.to(torch.float8_e4m3fn) for t in (paged.k_cache, paged.v_cache))
    q = randn(g, 19, 4, HEAD_DIM)
    out = paged_attention_prefill(q, k8, v8, paged.table, starts_of([19]), paged.lens, SCALE, 0.5, 2.0)
    codes = [t[0].to(torch.float8_e4m3fn).double() for t in (paged.keys, paged.values)]
    assert_close(out, brute_force(q.double(), codes[0] * 0.5, codes[1] * 2.0, SCALE), 1e-6)
    for k_scale, v_scale in ((1.0, 2.0), (0.5, 1.0), (2.0, 0.5)):
        wrong = brute_force(q.double(), codes[0] * k_scale, codes[1] * v_scale, SCALE)
        assert relative_error(out, wrong) > 0.05


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
def test_padded_rows_return_zeros_and_read_nothing(kv_dtype: torch.dtype) -> None:
    """Every block but the live row's is NaN, the padded rows' block 0 too."""
    g = generator(5)
    paged = Paged(g, [6], 2, torch.float32)
    k_cache, v_cache = paged.k_cache.to(kv_dtype), paged.v_cache.to(kv_dtype)
    table = torch.cat([paged.table, torch.zeros(2, paged.table.shape[1], dtype=torch.int32)])
    q = randn(g, 3, 4, HEAD_DIM)
    out = paged_attention_decode(q, k_cache, v_cache, table, torch.tensor([6, 0, 0]), SCALE, 1.0, 1.0)
    assert out[1:].eq(0).all()
    alone = paged_attention_decode(q[:1], k_cache, v_cache, paged.table, paged.lens, SCALE, 1.0, 1.0)
    assert torch.equal(out[:1], alone)
    assert not alone.isnan().any()
    out = paged_attention_prefill(
        q, k_cache, v_cache, table, torch.tensor([0, 1, 2, 2]), torch.tensor([6, 0, 4]), SCALE, 1.0, 1.0
    )
    assert torch.equal(out[:1], alone)
    assert out[1:].eq(0).all(), "a padded row and tokens that no row owns"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_alone_equals_the_row_in_a_batch(dtype: torch.dtype) -> None:
    g = generator(6)
    lengths, counts = [5, 17, 30, 8], [5, 4, 30, 1]
    paged = Paged(g, lengths, 2, dtype)
    q, starts = randn(g, sum(counts), 4, HEAD_DIM, dtype=dtype), starts_of(counts)
    caches = paged.k_cache, paged.v_cache
    together = paged_attention_prefill(q, *caches, paged.table, starts, paged.lens, SCALE, 1.0, 1.0)
    for row, (low, high) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
        one = slice(row, row + 1)
        alone = paged_attention_prefill(
            q[low:high], *caches, paged.table[one], starts_of([high - low]), paged.lens[one], SCALE, 1.0, 1.0
        )
        assert torch.equal(alone, together[low:high])
