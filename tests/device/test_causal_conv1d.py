"""Convolutions on the GPU: outputs against float64 with seeded defects, states bit for bit, splits, neighbours."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from hemiola.kernels.causal_conv1d import causal_conv1d_update
from hemiola.ops import causal_conv1d as reference
from hemiola.ops.device.causal_conv1d import causal_conv1d
from hemiola.ops.layout import PrefillLayout
from tests.support.numerics import generator, randn
from tests.support.separation import assert_separates, poisoned_allocations

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

BF16 = torch.bfloat16


def parameters(g: torch.Generator, channels: int, width: int) -> tuple[Tensor, Tensor]:
    return randn(g, channels, width, dtype=BF16).cuda(), randn(g, channels, dtype=BF16).cuda()


def tokens(g: torch.Generator, num_tokens: int, channels: int) -> Tensor:
    """A slice of in_proj's output."""
    return randn(g, num_tokens, channels + 4160, dtype=BF16).cuda()[:, 4096 : 4096 + channels]


def convolved(window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """window (T, Dc, K) -> (T Dc, 1), float64."""
    total = (window.double() * weight.double()).sum(-1) + (0.0 if bias is None else bias.double())
    return (total * torch.sigmoid(total)).reshape(-1, 1)


def equal_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


@pytest.mark.parametrize(
    ("num_rows", "channels", "width"), [(1, 6144, 4), (64, 6144, 4), (256, 6144, 4), (5, 328, 2), (3, 100, 3)]
)
def test_update(num_rows: int, channels: int, width: int) -> None:
    g = generator(num_rows)
    weight, bias = parameters(g, channels, width)
    x, num_slots = tokens(g, num_rows, channels), num_rows + 3
    state = torch.full((num_slots, channels, width - 1), torch.nan, dtype=BF16, device="cuda")
    slots = torch.randperm(num_slots, generator=g)[:num_rows].int().cuda()
    state[slots] = randn(g, num_rows, channels, width - 1, dtype=BF16).cuda()
    if num_rows > 1:
        slots[1] = -1
    live, expected_state, before = slots >= 0, state.clone(), state[slots.clamp(min=0)]
    with poisoned_allocations():
        out = causal_conv1d_update(x, weight, bias, state, slots)
    expected = reference.causal_conv1d_update(x, weight, bias, expected_state, slots)
    assert equal_bits(state, expected_state)
    assert out[~live].eq(0).all()
    window = torch.cat([before, x[..., None]], -1)[live]
    assert_separates(
        f"update {num_rows} x {channels} x {width}",
        out[live].reshape(-1, 1),
        expected[live].reshape(-1, 1),
        convolved(window, weight, bias),
        {
            "no bias": convolved(window, weight, None),
            "taps reversed": convolved(window, weight.flip(1), bias),
            "the weights of the next channel": convolved(window, weight.roll(1, 0), bias),
            "a stale state": convolved(window.roll(1, -1), weight, bias),
            "no history": convolved(torch.cat([before * 0, x[..., None]], -1)[live], weight, bias),
        },
    )


@pytest.mark.parametrize(
    ("counts", "computed", "channels", "width"),
    [
        ([8192], [0], 6144, 4),
        ([1024] * 16, [0] * 16, 6144, 4),
        ([1, 2, 3, 500, 1, 129], [5, 0, 128, 77, 0, 3], 6144, 4),
        ([1, 1, 2, 70], [5, 0, 128, 77], 328, 2),
    ],
)
def test_varlen(counts: list[int], computed: list[int], channels: int, width: int) -> None:
    g = generator(channels)
    weight, bias = parameters(g, channels, width)
    starts, num_rows = [0, *accumulate(counts)], len(counts)
    x = tokens(g, starts[-1], channels)
    state = torch.full((num_rows + 2, channels, width - 1), torch.nan, dtype=BF16, device="cuda")
    slots = torch.randperm(num_rows + 2, generator=g)[:num_rows].int().cuda()
    has_initial = torch.tensor(computed, device="cuda") > 0
    state[slots[has_initial]] = randn(g, int(has_initial.sum()), channels, width - 1, dtype=BF16).cuda()
    history = torch.where(has_initial[:, None, None], state[slots], torch.zeros_like(state[slots]))
    expected_state = state.clone()
    layout = PrefillLayout.build(starts, computed, 128, "cuda")
    start_loc = torch.tensor(starts, dtype=torch.int32, device="cuda")
    with poisoned_allocations():
        out = causal_conv1d(x, weight, bias, state, slots, start_loc, has_initial, layout)
    expected = reference.causal_conv1d(x, weight, bias, expected_state, slots, start_loc, has_initial)
    assert equal_bits(state, expected_state)

    def windows(history: Tensor, *, resets: bool = True) -> Tensor:
        parts = []
        for row, (low, high) in enumerate(pairwise(starts)):
            before = history[row].T if resets or low == 0 else x[low - width + 1 : low]
            parts.append(torch.cat([before, x[low:high]]).unfold(0, width, 1))
        return torch.cat(parts)

    window = windows(history)
    defects = {
        "taps reversed": convolved(window, weight.flip(1), bias),
        "no bias": convolved(window, weight, None),
        "one token late": convolved(window.roll(1, 0), weight, bias),
    }
    if has_initial.any():
        defects["dropped history"] = convolved(windows(history * 0), weight, bias)
        defects["the history of a neighbour"] = convolved(windows(history.roll(1, 0)), weight, bias)
    if num_rows > 1 and width <= counts[0] + 1:
        defects["rows run into each other"] = convolved(windows(history, resets=False), weight, bias)
    exact = convolved(window, weight, bias)
    assert_separates(f"varlen {counts[:6]}", out.reshape(-1, 1), expected.reshape(-1, 1), exact, defects)


def test_splits_and_neighbours_change_no_bit() -> None:
    g = generator(1)
    weight, bias = parameters(g, 6144, 4)
    x = tokens(g, 300, 6144)

    def run(cuts: list[int]) -> tuple[Tensor, Tensor]:
        state, parts = torch.full((2, 6144, 3), torch.nan, dtype=BF16, device="cuda"), []
        slots = torch.tensor([1], device="cuda")
        for low, high in pairwise([0, *cuts, 300]):
            if high - low == 1 and low:
                parts.append(causal_conv1d_update(x[low:high], weight, bias, state, slots))
            else:
                starts = torch.tensor([0, high - low], dtype=torch.int32, device="cuda")
                has = torch.tensor([low > 0], device="cuda")
                parts.append(causal_conv1d(x[low:high], weight, bias, state, slots, starts, has))
        return torch.cat(parts), state[1]

    whole, last = run([])
    for cuts in ([1], [2, 3, 5], [128, 256], [17, 299], [296, 297, 298, 299]):
        out, state = run(cuts)
        assert torch.equal(out, whole)
        assert torch.equal(state, last)
