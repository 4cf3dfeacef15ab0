"""The one-token SSD update against the float64 recurrence, padding, and that nothing but y is rounded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hemiola.ops.ssd_update import ssd_update
from tests.support.numerics import INF, assert_close, assert_ledger, bf16, generator, randn, relative_error
from tests.support.ssd import SSDInputs, recurrence

SLOTS = 6
NO_LIMIT = (0.0, INF)


def run(inputs: SSDInputs, ssm_state: Tensor, slots: list[int], dt_limit: tuple[float, float] = NO_LIMIT) -> Tensor:
    i = inputs
    indices = torch.tensor(slots, dtype=torch.int32)
    return ssd_update(i.x, i.dt, i.A, i.B, i.C, i.D, i.dt_bias, ssm_state, indices, dt_limit)


def states(g: torch.Generator, inputs: SSDInputs, slots: list[int]) -> Tensor:
    """NaN but for the given slots."""
    _, heads, head_dim = inputs.x.shape
    state = torch.full((SLOTS, heads, head_dim, inputs.B.shape[2]), float("nan"))
    for slot in slots:
        state[slot] = randn(g, *state.shape[1:])
    return state


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 1), (4, 2), (8, 8)])
@pytest.mark.parametrize("dt_limit", [NO_LIMIT, (0.01, 0.1)])
def test_float32_equals_the_recurrence(heads: int, groups: int, dt_limit: tuple[float, float]) -> None:
    g = generator(heads)
    slots = [4, 0, 3]
    inputs = SSDInputs.random(g, 3, heads=heads, groups=groups)
    state = states(g, inputs, slots)
    before = state.clone()
    y = run(inputs, state, slots, dt_limit)
    for row, slot in enumerate(slots):
        one = inputs.rows(slice(row, row + 1))
        expected, new_state = recurrence(one, before[slot], dt_limit)
        assert_close(y[row : row + 1], expected, 1e-6)
        assert_close(state[slot], new_state, 5e-7)
        if dt_limit != NO_LIMIT and heads > 1:
            assert relative_error(state[slot], recurrence(one, before[slot])[1]) > 1e-2, "the limit bites"
        if groups == 2:  # heads are consecutive in a group, not interleaved
            interleaved = replace(one, B=one.B[:, [0, 1] * 2], C=one.C[:, [0, 1] * 2])
            assert relative_error(state[slot], recurrence(interleaved, before[slot])[1]) > 1e-2
    assert state[[1, 2, 5]].isnan().all(), "neighbours' slots are untouched"


def test_softplus_is_linear_above_20_and_tiny_steps_are_not_raised() -> None:
    """dt of about e^-12 stays what it is: there is no lower bound of 0.001 or the like."""
    g = generator(1)
    inputs = SSDInputs.random(g, 2)
    inputs = replace(inputs, dt=torch.tensor([[25.0] * 4, [-12.0] * 4]), dt_bias=torch.zeros(4))
    state = torch.zeros(SLOTS, 4, 3, 5)
    run(inputs, state, [0, 1])
    for row in (0, 1):
        assert_close(state[row], recurrence(inputs.rows(slice(row, row + 1)))[1], 1e-6)
    raised = recurrence(inputs.rows(slice(1, 2)), None, (1e-3, INF))[1]
    assert relative_error(state[1], raised) > 0.9


def test_bf16_ledger() -> None:
    """Everything float32: only y is rounded, and the state is not."""
    g = generator(2)
    slots = list(range(SLOTS))
    inputs = SSDInputs.random(g, SLOTS, heads=16, head_dim=16, groups=4, state_size=16, dtype=torch.bfloat16)
    state = states(g, inputs, slots)
    before = state.clone()
    y = run(inputs, state, slots)
    steps = inputs.step_sizes()
    B, C = (t.double().repeat_interleave(4, 1)[:, :, None, :] for t in (inputs.B, inputs.C))
    x, D, step = inputs.x.double(), inputs.D.double()[:, None], steps[..., None, None]
    kept = torch.exp(inputs.A.double()[:, None, None] * step) * before.double()
    new = kept + step * B * x[..., None]
    rounded_b = kept + bf16(step * B) * x[..., None]
    assert_close(state, new, 5e-7)
    for other in (rounded_b, bf16(new), kept + bf16(step) * B * x[..., None]):
        assert relative_error(state, other) > 3e-4

    def read(state: Tensor) -> Tensor:
        return (state * C).sum(-1)

    assert_ledger(
        y,
        read(new) + D * x,
        {
            "a rounded new state": read(bf16(new)) + D * x,
            "a rounded weighted B": read(rounded_b) + D * x,
            "a rounding before D x": bf16(read(new)) + D * x,
            "a rounded D": read(new) + bf16(D) * x,
            "the old state": read(before.double()) + D * x,
        },
    )


def test_padded_rows_touch_nothing_and_return_zeros() -> None:
    g = generator(3)
    inputs = SSDInputs.random(g, 3)
    for slots in ([-1, 2, -1], [0, -1, 5], [-1, -1, -1]):
        state = states(g, inputs, [s for s in slots if s >= 0])
        before = state.clone()
        y = run(inputs, state, slots)
        for row, slot in enumerate(slots):
            if slot < 0:
                assert y[row].eq(0).all()
            else:
                expected, new_state = recurrence(inputs.rows(slice(row, row + 1)), before[slot])
                assert_close(y[row : row + 1], expected, 1e-6)
                assert_close(state[slot], new_state, 5e-7)
        assert state[[s for s in range(SLOTS) if s not in slots]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_alone_equals_the_row_in_a_batch(dtype: torch.dtype) -> None:
    g = generator(4)
    inputs = SSDInputs.random(g, 5, dtype=dtype)
    slots = [5, 1, 2, 0, 4]
    state = states(g, inputs, slots)
    alone_state = state.clone()
    y = run(inputs, state, slots)
    for row, slot in enumerate(slots):
        alone = run(inputs.rows(slice(row, row + 1)), alone_state, [slot])
        # Not to the bit: torch's vectorised softplus and its scalar one differ in the last bit.
        assert_close(alone[0], y[row], 4e-3 if dtype == torch.bfloat16 else 1e-6)
        assert_close(alone_state[slot], state[slot], 5e-7)
