"""The causal convolution and its one-token form: plain loops, rolling state, splits, padding, and the ledger."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from hemiola.ops.causal_conv1d import causal_conv1d, causal_conv1d_update
from tests.support.numerics import assert_close, assert_ledger, bf16, generator, randn, relative_error

CHANNELS, SLOTS = 12, 4
NAN = float("nan")


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def loops(x: Tensor, history: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """x (T, Dc), history (Dc, K-1), float64, token by token. Returns what enters SiLU and the new history."""
    history = history.clone()
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        window = torch.cat([history, x[t][:, None]], 1)
        for channel in range(x.shape[1]):
            total = 0.0 if bias is None else float(bias[channel])
            for tap in range(weight.shape[1]):
                total += float(weight[channel, tap]) * float(window[channel, tap])
            out[t, channel] = total
        history = window[:, 1:]
    return out, history


def parameters(g: torch.Generator, width: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return randn(g, CHANNELS, width, dtype=dtype), randn(g, CHANNELS, dtype=dtype)


def states(width: int = 4, dtype: torch.dtype = torch.float32, fill: float = NAN) -> Tensor:
    return torch.full((SLOTS, CHANNELS, width - 1), fill, dtype=dtype)


def run(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, slots: list[int], counts: list[int], has: list[bool]
) -> Tensor:
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    return causal_conv1d(
        x, weight, bias, state, torch.tensor(slots, dtype=torch.int32), starts, torch.tensor(has, dtype=torch.bool)
    )


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 15, 16, 17, 53])
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("has_initial", [True, False])
def test_float32_equals_plain_loops(num_tokens: int, width: int, with_bias: bool, has_initial: bool) -> None:
    g = generator(num_tokens)
    weight, bias = parameters(g, width)
    x, state = randn(g, num_tokens, CHANNELS), states(width)
    if has_initial:
        state[2] = randn(g, CHANNELS, width - 1)
    history = state[2].double() if has_initial else torch.zeros(CHANNELS, width - 1, dtype=torch.float64)
    used_bias = bias if with_bias else None
    out = run(x, weight, used_bias, state, [2], [num_tokens], [has_initial])
    expected, new_history = loops(x.double(), history, weight.double(), used_bias)
    assert_close(out, silu(expected), 1e-6)
    assert torch.equal(state[2].double(), new_history), "the state is the last raw inputs, bit for bit"
    assert state[[0, 1, 3]].isnan().all(), "neighbours' slots are untouched"
    if width > 1 and num_tokens > 1:
        flipped, _ = loops(x.double(), history, weight.double().flip(1), used_bias)
        assert relative_error(out, silu(flipped)) > 0.1


@pytest.mark.parametrize("with_bias", [True, False])
def test_update_equals_plain_loops(with_bias: bool) -> None:
    g = generator(1)
    weight, bias = parameters(g)
    x, state = randn(g, 3, CHANNELS), states()
    slots = [3, 0, 1]
    state[slots] = randn(g, 3, CHANNELS, 3)
    before, used_bias = state.clone(), bias if with_bias else None
    out = causal_conv1d_update(x, weight, used_bias, state, torch.tensor(slots, dtype=torch.int32))
    for row, slot in enumerate(slots):
        expected, history = loops(x[row : row + 1].double(), before[slot].double(), weight.double(), used_bias)
        assert_close(out[row : row + 1], silu(expected), 1e-6)
        assert torch.equal(state[slot].double(), history)
    assert state[2].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", [[], [13], [1], [39], [2, 3], list(range(4, 40, 4)), list(range(1, 40))])
def test_any_split_of_a_prompt_gives_the_same(cuts: list[int], dtype: torch.dtype) -> None:
    """B3; a piece of one token may also take the one-token form."""
    g = generator(2)
    weight, bias = parameters(g, dtype=dtype)
    x, whole_state = randn(g, 40, CHANNELS, dtype=dtype), states(dtype=dtype)
    whole = run(x, weight, bias, whole_state, [1], [40], [False])
    for one_token_form in (False, True):
        state, parts = states(dtype=dtype), []
        for low, high in zip([0, *cuts], [*cuts, 40], strict=True):
            if one_token_form and high - low == 1 and low:
                index = torch.tensor([1], dtype=torch.int32)
                parts.append(causal_conv1d_update(x[low:high], weight, bias, state, index))
            else:
                parts.append(run(x[low:high], weight, bias, state, [1], [high - low], [low > 0]))
        assert torch.equal(state[1], whole_state[1])
        # Not to the bit: torch's vectorised SiLU and its scalar one differ in the last bit.
        assert_close(torch.cat(parts), whole, 4e-3 if dtype == torch.bfloat16 else 2e-7)


def test_requests_of_a_batch_do_not_leak_into_each_other() -> None:
    """Three requests side by side, one of them continuing: each as alone, the history of the others not seen."""
    g = generator(3)
    weight, bias = parameters(g)
    x, state = randn(g, 37 + 5 + 2, CHANNELS), states()
    state[0] = randn(g, CHANNELS, 3)
    start_state = state.clone()
    out = run(x, weight, bias, state, [3, 0, 1], [37, 5, 2], [False, True, False])
    for low, high, slot, has in ((0, 37, 3, False), (37, 42, 0, True), (42, 44, 1, False)):
        alone_state = start_state.clone()
        alone = run(x[low:high], weight, bias, alone_state, [slot], [high - low], [has])
        assert torch.equal(out[low:high], alone)
        assert torch.equal(state[slot], alone_state[slot])
    assert state[2].isnan().all()


def test_a_first_chunk_never_reads_its_slot() -> None:
    """B18: the old tenant left NaN; shorter than the window, so that zeros are left in the new state."""
    g = generator(4)
    weight, bias = parameters(g)
    x, state = randn(g, 2, CHANNELS), states()
    out = run(x, weight, bias, state, [1], [2], [False])
    clean = states(fill=0.0)
    assert torch.equal(out, run(x, weight, bias, clean, [1], [2], [True]))
    assert torch.equal(state[1], torch.cat([torch.zeros(CHANNELS, 1), x.T], 1))


def test_padded_rows_touch_nothing_and_return_zeros() -> None:
    g = generator(5)
    weight, bias = parameters(g)
    x = randn(g, 6, CHANNELS)
    state = states(fill=1.0)
    out = run(x, weight, bias, state, [-1, 2, -1], [2, 3, 1], [True, False, False])
    assert out[[0, 1, 5]].eq(0).all()
    assert out[2:5].ne(0).any(1).all()
    assert state[[0, 1, 3]].eq(1).all()

    for slots, live in (([-1, 0, -1], [1]), ([-1, -1, -1], []), ([0, -1, 2], [0, 2])):
        state = states(fill=1.0)
        out = causal_conv1d_update(x[:3], weight, bias, state, torch.tensor(slots, dtype=torch.int32))
        for row, slot in enumerate(slots):
            if row in live:
                alone = causal_conv1d_update(x[row : row + 1], weight, bias, states(fill=1.0), torch.tensor([slot]))
                assert_close(out[row : row + 1], alone, 2e-7)
            else:
                assert out[row].eq(0).all()
        untouched = [s for s in range(SLOTS) if s not in slots]
        assert state[untouched].eq(1).all()


def test_rows_without_tokens_keep_their_state() -> None:
    g = generator(6)
    state = states(fill=1.0)
    run(randn(g, 1, CHANNELS), *parameters(g), state, [0, 1], [0, 1], [True, True])
    assert state[0].eq(1).all()
    assert state[1].ne(1).any()


@pytest.mark.parametrize("one_token", [False, True])
def test_bf16_ledger(one_token: bool) -> None:
    """Each product rounded to bf16, added in float32 to the bias, oldest tap first; SiLU of the unrounded sum."""
    g = generator(7)
    channels, num_tokens = 512, 40
    weight, bias = randn(g, channels, 4, dtype=torch.bfloat16), randn(g, channels, dtype=torch.bfloat16)
    window = randn(g, num_tokens, channels, 4, dtype=torch.bfloat16)
    if one_token:  # 40 requests of one token
        state = window[..., :3].clone()
        out = causal_conv1d_update(window[..., 3], weight, bias, state, torch.arange(num_tokens))
    else:
        x = window[:, :, 3]
        padded = torch.cat([torch.zeros(3, channels, dtype=torch.bfloat16), x])
        window = torch.stack([padded[i : i + num_tokens] for i in range(4)], -1)
        state = torch.zeros(1, channels, 3, dtype=torch.bfloat16)
        out = causal_conv1d(x, weight, bias, state, torch.tensor([0]), torch.tensor([0, 40]), torch.tensor([False]))
    products, start = window.double() * weight.double(), bias.double().expand(num_tokens, channels)
    rounded_sum = start
    for tap in range(4):
        rounded_sum = bf16(rounded_sum + bf16(products[..., tap]))
    total = start + bf16(products).sum(-1)
    assert_ledger(
        out,
        silu(total),
        {
            "unrounded products": silu(start + products.sum(-1)),
            "a bf16 accumulator": silu(rounded_sum),
            "a rounding before SiLU": silu(bf16(total)),
            "a bias added to the rounded sum": silu(bf16(bf16(products).sum(-1)) + start),
        },
    )
    assert out.dtype == state.dtype == torch.bfloat16


def test_taps_are_added_oldest_first() -> None:
    """Float32 sums depend on their order: 2^24 swallows a one that is added to it."""
    weight = torch.ones(1, 4)
    cases = {(2.0**24, 1.0, -(2.0**24), 0.5): 0.5, (2.0**24, -(2.0**24), 1.0, 0.5): 1.5}
    for window, total in cases.items():
        state = torch.tensor([[window[:3]]])
        out = causal_conv1d_update(torch.tensor([[window[3]]]), weight, None, state, torch.tensor([0]))
        assert_close(out, silu(torch.tensor([[total]], dtype=torch.float64)), 1e-6)
    # The bias is where the sum starts.
    state = torch.tensor([[[1.0, 0.0, -(2.0**24)]]])
    out = causal_conv1d_update(torch.tensor([[0.0]]), weight, torch.tensor([2.0**24]), state, torch.tensor([0]))
    assert out.item() == 0
