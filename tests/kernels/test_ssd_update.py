"""SSD update kernel in the interpreter against the float64 recurrence; states as well as outputs."""

from __future__ import annotations

import pytest
import torch

from hemiola.kernels.ssd_update import UpdateTile, ssd_update
from tests.support.numerics import INF, assert_close, assert_ledger, generator, randn, relative_error
from tests.support.separation import poisoned_allocations
from tests.support.ssd import SSDInputs, recurrence

SLOTS = [3, -1, 0, 4]


@pytest.mark.parametrize("shape", [(4, 16, 2, 16), (2, 20, 1, 24), (4, 3, 4, 5), (1, 1, 1, 1), (2, 64, 2, 32)])
@pytest.mark.parametrize("dt_limit", [(0.0, INF), (0.1, 0.11)])
@pytest.mark.parametrize("tile", [None, UpdateTile(4, 1)])
def test_equals_the_recurrence(
    shape: tuple[int, int, int, int], dt_limit: tuple[float, float], tile: UpdateTile | None
) -> None:
    heads, head_dim, groups, state_size = shape
    g = generator(heads)
    inputs = SSDInputs.random(
        g, 4, heads=heads, head_dim=head_dim, groups=groups, state_size=state_size, dtype=torch.bfloat16
    )
    state = torch.full((6, heads, head_dim, state_size), torch.nan)
    state[[0, 3, 4]] = randn(g, 3, *state.shape[1:])
    before = state.clone()
    i = inputs
    with poisoned_allocations():
        y = ssd_update(
            i.x, i.dt, i.A, i.B, i.C, i.D, i.dt_bias, state, torch.tensor(SLOTS, dtype=torch.int32), dt_limit, tile
        )
    for row, slot in enumerate(SLOTS):
        if slot < 0:
            assert y[row].eq(0).all()
            continue
        expected, new_state = recurrence(inputs.rows(slice(row, row + 1)), before[slot], dt_limit)
        assert_ledger(y[row], expected[0], {})
        assert_close(state[slot], new_state, 1e-6)
        if dt_limit != (0.0, INF) and heads > 1:
            assert relative_error(state[slot], recurrence(inputs.rows(slice(row, row + 1)), before[slot])[1]) > 1e-3
    assert state[[1, 2, 5]].isnan().all(), "neighbours' slots are untouched"


def test_tiny_steps_keep_their_precision() -> None:
    """A bias of -15 makes steps of 3e-7: log(1 + exp(x)) as written would be zero or twice as much."""
    inputs = SSDInputs.random(generator(0), 1, heads=4, head_dim=4, groups=1, state_size=4, dtype=torch.bfloat16)
    inputs.dt_bias.copy_(torch.tensor([-15.0, -10.0, 5.0, 30.0]))
    state = torch.zeros(1, 4, 4, 4)
    i = inputs
    ssd_update(i.x, i.dt, i.A, i.B, i.C, i.D, i.dt_bias, state, torch.tensor([0]))
    _, expected = recurrence(inputs)
    for head in range(4):
        assert_close(state[0, head], expected[head], 2e-6)


def test_no_rows() -> None:
    inputs = SSDInputs.random(generator(0), 0)
    i = inputs
    state = torch.zeros(1, 4, 3, 5)
    assert ssd_update(i.x, i.dt, i.A, i.B, i.C, i.D, i.dt_bias, state, torch.empty(0)).shape == (0, 4, 3)
