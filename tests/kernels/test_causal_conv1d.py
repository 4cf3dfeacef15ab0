"""Convolution kernels in the interpreter against the reference: every bit of outputs and states, on views."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from hemiola.kernels.causal_conv1d import causal_conv1d_update
from hemiola.ops import causal_conv1d as reference
from hemiola.ops.device.causal_conv1d import causal_conv1d
from hemiola.ops.layout import PrefillLayout
from tests.support.numerics import generator, randn, ulps
from tests.support.separation import poisoned_allocations

SLOTS = 6


def tokens(g: torch.Generator, num_tokens: int, channels: int) -> Tensor:
    return randn(g, num_tokens, channels + 24, dtype=torch.bfloat16)[:, 8 : 8 + channels]


def states(g: torch.Generator, channels: int, width: int, live: list[int]) -> Tensor:
    """NaN but in the slots that may be read."""
    state = torch.full((SLOTS, channels, width - 1), torch.nan, dtype=torch.bfloat16)
    state[live] = randn(g, len(live), channels, width - 1, dtype=torch.bfloat16)
    return state


def assert_same(result: Tensor, expected: Tensor) -> None:
    """exp may differ in its last bit, and with it, at times, the rounded result."""
    distance = ulps(result, expected)
    assert distance.max() <= 1
    assert (distance > 0).float().mean() <= 0.01


def assert_same_states(result: Tensor, expected: Tensor) -> None:
    assert torch.equal(result.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("channels", [40, 272])
@pytest.mark.parametrize("has_bias", [True, False])
def test_update(width: int, channels: int, has_bias: bool) -> None:
    g = generator(channels)
    x, weight = tokens(g, 4, channels), randn(g, channels, width, dtype=torch.bfloat16)
    bias = randn(g, channels, dtype=torch.bfloat16) if has_bias else None
    slots = torch.tensor([4, -1, 0, 3], dtype=torch.int32)
    state = states(g, channels, width, [0, 3, 4])
    expected_state = state.clone()
    with poisoned_allocations():
        out = causal_conv1d_update(x, weight, bias, state, slots)
    assert_same(out, reference.causal_conv1d_update(x, weight, bias, expected_state, slots))
    assert_same_states(state, expected_state)
    assert out[1].eq(0).all()


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("channels", [40, 272])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("knows_layout", [True, False])
def test_rows_of_all_kinds(width: int, channels: int, has_bias: bool, knows_layout: bool) -> None:
    """Shorter than the window, with history and without, padded, empty, across tiles; and a token that no row owns."""
    counts, computed, slots = [1, 2, 2, 3, 0, 40, 1, 19], [3, 5, 0, 9, 7, 0, 0, 1], [4, 1, 0, -1, 3, 2, -1, 5]
    g = generator(channels)
    starts = [0, *accumulate(counts)]
    x, weight = tokens(g, starts[-1] + 1, channels), randn(g, channels, width, dtype=torch.bfloat16)
    bias = randn(g, channels, dtype=torch.bfloat16) if has_bias else None
    state = states(g, channels, width, [1, 4, 5])
    expected_state = state.clone()
    rows = (torch.tensor(slots, dtype=torch.int32), torch.tensor(starts, dtype=torch.int32), torch.tensor(computed) > 0)
    layout = PrefillLayout.build(starts, computed, 16) if knows_layout else None
    with poisoned_allocations():
        out = causal_conv1d(x, weight, bias, state, *rows, layout)
    assert_same(out, reference.causal_conv1d(x, weight, bias, expected_state, *rows))
    assert_same_states(state, expected_state)
    assert out[-1].eq(0).all()


def test_splits_keep_every_bit() -> None:
    g = generator(0)
    x, weight = tokens(g, 23, 40), randn(g, 40, 4, dtype=torch.bfloat16)

    def run(cuts: list[int]) -> tuple[Tensor, Tensor]:
        state, parts = states(g, 40, 4, []), []
        for low, high in zip([0, *cuts], [*cuts, 23], strict=True):
            starts, has = torch.tensor([0, high - low], dtype=torch.int32), torch.tensor([low > 0])
            parts.append(causal_conv1d(x[low:high], weight, None, state, torch.tensor([2]), starts, has))
        return torch.cat(parts), state[2]

    whole, last = run([])
    for cuts in ([1], [2], [3], [16], [22], list(range(1, 23))):
        out, state = run(cuts)
        assert torch.equal(out, whole)
        assert torch.equal(state, last)


def test_no_rows() -> None:
    x, state = torch.empty(0, 8), torch.zeros(1, 8, 3)
    no_rows = torch.empty(0, dtype=torch.int32)
    assert causal_conv1d_update(x, torch.ones(8, 4), None, state, no_rows).shape == (0, 8)
    starts = torch.zeros(1, dtype=torch.int32)
    assert causal_conv1d(x, torch.ones(8, 4), None, state, no_rows, starts, no_rows > 0).shape == (0, 8)
