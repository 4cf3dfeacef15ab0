"""Paged attention on the GPU: against float64 at real and odd shapes, and what a row's bits depend on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from hemiola.ops import paged_attention as reference
from hemiola.ops.device import paged_attention as device
from hemiola.ops.layout import PrefillLayout
from tests.support.paged import MARKED, Paged, attend
from tests.support.separation import assert_separates, poisoned_allocations

E4M3 = torch.float8_e4m3fn
SCALES = 0.7, 1.3
HEADS = [(32, 2, 128), (40, 8, 128), (8, 2, 32), (12, 12, 80)]


def generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def queries(g: torch.Generator, tokens: int, heads: int, head_dim: int) -> Tensor:
    """Scores of a standard deviation of two: a token can matter. A slice of a wider tensor."""
    wide = torch.randn(tokens, heads + 2, head_dim, generator=g, device="cuda") * 2
    return wide.bfloat16()[:, 1:-1]


def factors(dtype: torch.dtype) -> tuple[float, float]:
    return SCALES if dtype == E4M3 else (1.0, 1.0)


def compare(name: str, q: Tensor, paged: Paged, row: int, dtype: torch.dtype, out: Tensor, expected: Tensor) -> None:
    """The last queries of one row. Short rows have to notice one marked token, longer ones all at one place."""
    k_scale, v_scale = factors(dtype)
    keys, values, scale = paged.keys[row], paged.values[row], q.shape[2] ** -0.5
    length = len(keys)
    taken = 1 if length <= 100 else MARKED
    hidden = {"first tokens": slice(0, taken), "last tokens": slice(length - taken, length)}
    if length > 2 * taken:
        hidden["tokens between"] = slice(length // 2, length // 2 + taken)

    def exact(k_scale: float = k_scale, v_scale: float = v_scale, **defect: object) -> Tensor:
        return attend(q, keys * k_scale, values * v_scale, scale, **defect)

    defects = {"values' scale": exact(v_scale=1.1 * v_scale)}
    if length > 1:
        defects["scores' scale"] = exact(k_scale=1.1 * k_scale)
    if length > len(q) + 2 * taken:
        defects |= {what: exact(hide=where) for what, where in hidden.items()}
    if keys.shape[1] not in (1, q.shape[1]):
        defects["heads in turns"] = exact(interleaved=True)
    assert_separates(name, out, expected, exact(), defects)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("invariant", [False, True])
def test_decode(heads: tuple[int, int, int], dtype: torch.dtype, invariant: bool) -> None:
    num_heads, kv_heads, head_dim = heads
    g = generator(num_heads)
    lengths = [1, 16, 63, 64, 65, 300, 0, 1000, 1024, 1025, 8192]
    paged = Paged(g, lengths, kv_heads, head_dim, dtype, mark=64.0)
    q = queries(g, len(lengths), num_heads, head_dim)
    arguments = q, paged.k_cache, paged.v_cache, paged.table, paged.lens, head_dim**-0.5, *SCALES
    assert device.unsupported(*arguments) is None
    with poisoned_allocations():
        out = device.paged_attention_decode(*arguments, invariant=invariant)
    expected = reference.paged_attention_decode(*arguments)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        if length == 0:
            assert out[row].eq(0).all()
        else:
            compare(f"{length} tokens", q[one], paged, row, dtype, out[one], expected[one])


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
@pytest.mark.parametrize(("rows", "length"), [(1, 32768), (1, 33000), (2, 9000), (3, 5000), (7, 20000), (64, 2048)])
def test_decode_of_long_contexts(rows: int, length: int, dtype: torch.dtype) -> None:
    g = generator(rows)
    paged = Paged(g, [length] * rows, 2, 128, dtype, mark=64.0)
    q = queries(g, rows, 32, 128)
    arguments = q, paged.k_cache, paged.v_cache, paged.table, paged.lens, 128**-0.5, *SCALES
    out = device.paged_attention_decode(*arguments, invariant=False)
    expected = reference.paged_attention_decode(*arguments)
    for row in {0, rows // 2, rows - 1}:
        one = slice(row, row + 1)
        compare(f"{rows} x {length}", q[one], paged, row, dtype, out[one], expected[one])
    assert torch.equal(device.paged_attention_decode(*arguments, invariant=False), out)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("rows", [2, 5, 40, 100])
def test_decode_of_ragged_rows(rows: int, invariant: bool) -> None:
    """Rows without tokens, with one split and with several, in a table that is wider than any needs."""
    g = generator(rows)
    lengths = [(0, 9000, 130, 1, 700)[i % 5] + 3 * i * (i % 5 > 0) for i in range(rows)]
    paged = Paged(g, lengths, 2, 128, mark=64.0)
    table = torch.nn.functional.pad(paged.table, (0, 3000), value=-1)
    q = queries(g, rows, 32, 128)
    arguments = q, paged.k_cache, paged.v_cache, table, paged.lens, 128**-0.5, *SCALES
    with poisoned_allocations():
        out = device.paged_attention_decode(*arguments, invariant=invariant)
    expected = reference.paged_attention_decode(*arguments)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        if length == 0:
            assert out[row].eq(0).all()
        else:
            compare(f"row {row}, {length} tokens", q[one], paged, row, torch.bfloat16, out[one], expected[one])


def test_invariant_decode_depends_on_the_row_alone() -> None:
    g = generator(1)
    lengths = [*range(1, 3000, 97), 8192, 1024]
    paged = Paged(g, lengths, 2, 128)
    q = queries(g, len(lengths), 32, 128)

    def run(rows: Sequence[int], columns: int, invariant: bool = True) -> Tensor:
        table = torch.nn.functional.pad(paged.table, (0, columns))[rows]
        caches = paged.k_cache, paged.v_cache, table, paged.lens[rows]
        return device.paged_attention_decode(q[rows], *caches, 0.1, 1.0, 1.0, invariant=invariant)

    everyone = list(range(len(lengths)))
    together = run(everyone, 0)
    for rows in ([0], [5], everyone[::-1], everyone[3:11], [len(lengths) - 2], everyone * 8):
        assert torch.equal(run(rows, 3), together[rows])
    assert not torch.equal(run([len(lengths) - 2], 0, False), run(everyone, 0, False)[-2:-1]), "nothing is shown"


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_a_captured_decode_follows_lengths_and_tables(dtype: torch.dtype) -> None:
    g = generator(2)
    paged = Paged(g, [700, 3000, 40, 1], 2, 128, dtype, mark=64.0)
    q = queries(g, 4, 32, 128)
    table, lens = torch.zeros_like(paged.table), torch.zeros_like(paged.lens)
    arguments = q, paged.k_cache, paged.v_cache, table, lens, 0.1, *SCALES
    device.paged_attention_decode(*arguments, invariant=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = device.paged_attention_decode(*arguments, invariant=False)
    for rows in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 1, 0, 2]):
        table.copy_(paged.table[rows])
        lens.copy_(paged.lens[rows])
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, device.paged_attention_decode(*arguments, invariant=False))
    lens.zero_()
    table.fill_(-1)
    graph.replay()
    assert out.eq(0).all()


def prefill(q: Tensor, paged: Paged, counts: Sequence[int], scale: float) -> tuple[Tensor, Tensor]:
    """The device's result and the reference's."""
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    computed = [max(length - count, 0) for length, count in zip(paged.lens.tolist(), counts, strict=True)]
    layout = PrefillLayout.build(starts, computed, 128, "cuda")
    start_loc = torch.tensor(starts, dtype=torch.int32, device="cuda")
    arguments = q, paged.k_cache, paged.v_cache, paged.table, start_loc, paged.lens, scale, *SCALES
    assert device.unsupported(*arguments) is None
    with poisoned_allocations():
        out = device.paged_attention_prefill(*arguments, layout=layout)
    return out, reference.paged_attention_prefill(*arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_prefill(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """First chunks, later chunks, one token, padding, and tokens that no row owns."""
    num_heads, kv_heads, head_dim = heads
    g = generator(num_heads)
    lengths, counts = [1, 129, 0, 700, 1500, 65, 200], [1, 129, 3, 300, 1, 64, 0]
    paged = Paged(g, lengths, kv_heads, head_dim, dtype, mark=64.0)
    q = queries(g, sum(counts) + 5, num_heads, head_dim)
    out, expected = prefill(q, paged, counts, head_dim**-0.5)
    assert out[sum(counts) :].eq(0).all()
    start = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        part = slice(start, start + count)
        start += count
        if length == 0:
            assert out[part].eq(0).all()
        elif count:
            compare(f"{count} of {length}", q[part], paged, row, dtype, out[part], expected[part])


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_prefill_of_a_long_prompt(dtype: torch.dtype) -> None:
    g = generator(3)
    paged = Paged(g, [8192], 2, 128, dtype, mark=64.0)
    q = queries(g, 8192, 32, 128)
    out, expected = prefill(q, paged, [8192], 128**-0.5)
    compare("the end of 8192", q[-70:], paged, 0, dtype, out[-70:], expected[-70:])
    whole = paged.keys[0], paged.values[0]
    paged.keys[0], paged.values[0] = whole[0][:500], whole[1][:500]
    compare("500 of 8192", q[:500], paged, 0, dtype, out[:500], expected[:500])


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_every_cut_of_a_prompt_gives_the_same_bits(dtype: torch.dtype) -> None:
    g = generator(4)
    paged = Paged(g, [1000, 300, 50], 2, 128, dtype, mark=64.0)
    q = queries(g, 1350, 32, 128)
    together, _ = prefill(q, paged, [1000, 300, 50], 0.1)
    table = paged.table
    paged.table = table[:1]
    for cuts in ([1], [64, 128], [999], [500], [7, 100, 101, 640], list(range(16, 1000, 16))):
        for low, high in zip([0, *cuts], [*cuts, 1000], strict=True):
            paged.lens = torch.tensor([high], dtype=torch.int32, device="cuda")
            part, _ = prefill(q[low:high], paged, [high - low], 0.1)
            assert torch.equal(part, together[low:high]), (low, high)
    paged.table, paged.lens = table[1:2], torch.tensor([300], dtype=torch.int32, device="cuda")
    assert torch.equal(prefill(q[1000:1300], paged, [300], 0.1)[0], together[1000:1300])


def test_blocks_beyond_two_to_the_31_elements() -> None:
    g = generator(5)
    paged = Paged(g, [100, 40], 2, 128)
    q = queries(g, 2, 32, 128)
    arguments = 0.1, 1.0, 1.0
    expected = device.paged_attention_decode(
        q, paged.k_cache, paged.v_cache, paged.table, paged.lens, *arguments, invariant=False
    )
    far = 2**31 // (16 * 2 * 128) + 1
    k_cache, v_cache = (
        torch.empty(far + len(cache), *cache.shape[1:], dtype=cache.dtype, device="cuda")
        for cache in (paged.k_cache, paged.v_cache)
    )
    k_cache[far:], v_cache[far:] = paged.k_cache, paged.v_cache
    table = paged.table + far
    out = device.paged_attention_decode(q, k_cache, v_cache, table, paged.lens, *arguments, invariant=False)
    assert torch.equal(out, expected)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32, device="cuda")
    one_each = device.paged_attention_prefill(q, k_cache, v_cache, table, starts, paged.lens, *arguments)
    near = device.paged_attention_prefill(q, paged.k_cache, paged.v_cache, paged.table, starts, paged.lens, *arguments)
    assert torch.equal(one_each, near)
