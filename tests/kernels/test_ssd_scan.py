"""SSD scan kernels in the interpreter: the reference's roundings, the recurrence, splits, neighbours, slots."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from hemiola.ops.device.ssd_scan import ssd_scan, unsupported
from hemiola.ops.layout import PrefillLayout
from hemiola.ops.ssd_scan import ssd_scan as reference
from tests.support.numerics import INF, assert_close, generator, randn, relative_error, ulps
from tests.support.separation import poisoned_allocations
from tests.support.ssd import SSDInputs, recurrence

SLOTS = 8
NO_LIMIT = (0.0, INF)


def run(
    inputs: SSDInputs,
    state: Tensor,
    slots: list[int],
    counts: list[int],
    computed: list[int],
    chunk_size: int,
    dt_limit: tuple[float, float] = NO_LIMIT,
    *,
    scan: object = ssd_scan,
    knows_layout: bool = True,
) -> Tensor:
    i, starts = inputs, [0, *accumulate(counts)]
    rows = [torch.tensor(v, dtype=torch.int32) for v in (slots, starts, computed)]
    layout = PrefillLayout.build(starts, computed, chunk_size) if knows_layout else None
    assert callable(scan)
    with poisoned_allocations():
        y: Tensor = scan(i.x, i.dt, i.A, i.B, i.C, i.D, i.dt_bias, state, *rows, chunk_size, dt_limit, layout)
    return y


def random_inputs(g: torch.Generator, num_tokens: int, shape: tuple[int, int, int, int] = (4, 16, 2, 16)) -> SSDInputs:
    """B, C and dt are slices of wider rows."""
    heads, head_dim, groups, state_size = shape
    inputs = SSDInputs.random(
        g, num_tokens, heads=heads, head_dim=head_dim, groups=groups, state_size=state_size, dtype=torch.bfloat16
    )
    flat = torch.cat([inputs.x.flatten(1), inputs.B.flatten(1), inputs.C.flatten(1), inputs.dt], 1)
    x, B, C, dt = flat.split([heads * head_dim, groups * state_size, groups * state_size, heads], 1)
    parts = (x.unflatten(1, (heads, -1)), dt, inputs.A, B.unflatten(1, (groups, -1)), C.unflatten(1, (groups, -1)))
    return SSDInputs(*parts, inputs.D, inputs.dt_bias)


def states(g: torch.Generator, inputs: SSDInputs, live: list[int]) -> Tensor:
    """NaN but in the slots that may be read."""
    state = torch.full((SLOTS, *inputs.x.shape[1:], inputs.B.shape[2]), torch.nan)
    state[live] = randn(g, len(live), *state.shape[1:])
    return state


@pytest.mark.parametrize(
    ("shape", "chunk_size"),
    [((4, 16, 2, 16), 16), ((4, 20, 1, 24), 24), ((2, 8, 2, 40), 72), ((2, 4, 1, 4), 6), ((2, 20, 1, 24), 136)],
)
@pytest.mark.parametrize("dt_limit", [NO_LIMIT, (0.01, 0.1)])
def test_rows_of_all_kinds(shape: tuple[int, int, int, int], chunk_size: int, dt_limit: tuple[float, float]) -> None:
    """With a state before them and without, on the grid and off it, padded, empty; and a token that no row owns."""
    counts, computed, slots = [1, 2, 5, 3, 90, 0, 40, 1], [3, 0, 7, 2, 0, 1, 33, 0], [4, 2, 1, -1, 5, 0, 6, -1]
    g = generator(chunk_size)
    inputs = random_inputs(g, sum(counts) + 1, shape)
    state = states(g, inputs, [1, 4, 6])
    before, expected_state = state.clone(), state.clone()
    y = run(inputs, state, slots, counts, computed, chunk_size, dt_limit)
    expected = run(inputs, expected_state, slots, counts, computed, chunk_size, dt_limit, scan=reference)
    distance = ulps(y, expected)
    # Where a sum almost cancels, its last bits are many steps.
    assert (distance > 0).float().mean() <= 0.01
    assert_close(y.float(), expected.float(), 4e-3)
    assert torch.equal(state.isnan(), expected_state.isnan())
    low = 0
    for count, slot, done in zip(counts, slots, computed, strict=True):
        if slot >= 0 and count:
            largest = expected_state[slot].abs().max()
            flipped = (state[slot] - expected_state[slot]).abs() > 1e-5 * largest
            assert flipped.float().mean() <= 0.01, "more than a rounding of a weighted B here and there"
            part, initial = inputs.rows(slice(low, low + count)), before[slot] if done else None
            exact, exact_state = recurrence(part, initial, dt_limit)
            assert_close(y[low : low + count], exact, 1e-2)
            assert_close(state[slot], exact_state, 1e-2)
        low += count
    assert y[-1].eq(0).all()


@pytest.mark.parametrize("computed", [0, 16, 21])
def test_splits_on_the_grid_keep_every_bit(computed: int) -> None:
    g = generator(computed)
    inputs, initial = random_inputs(g, 53), randn(g, 4, 16, 16)
    to_grid = -computed % 16

    def piecewise(cuts: list[int]) -> tuple[Tensor, Tensor]:
        state, parts = states(g, inputs, []), []
        state[2] = initial if computed else torch.nan
        for low, high in pairwise([0, *cuts, 53]):
            piece = inputs.rows(slice(low, high))
            parts.append(run(piece, state, [2], [high - low], [computed + low], 16))
        return torch.cat(parts), state[2]

    whole, whole_state = piecewise([])
    for cuts in ([to_grid + 16], [to_grid + 32], [to_grid + 16, to_grid + 32]):
        y, state = piecewise(cuts)
        assert torch.equal(y, whole)
        assert torch.equal(state, whole_state)
    y, state = piecewise([to_grid + 7])
    assert not torch.equal(state, whole_state), "a split off the grid moves the roundings"
    assert_close(state, whole_state, 1e-2)


def test_neighbours_change_no_bit() -> None:
    """B27: a row in a batch of others is as the row alone."""
    g = generator(4)
    counts, slots, computed = [37, 5, 58], [3, 0, 1], [0, 21, 0]
    inputs = random_inputs(g, 100)
    state = states(g, inputs, [0])
    before = state.clone()
    y = run(inputs, state, slots, counts, computed, 16, knows_layout=False)
    for low, high, slot, done in ((0, 37, 3, 0), (37, 42, 0, 21), (42, 100, 1, 0)):
        alone_state = before.clone()
        alone = run(inputs.rows(slice(low, high)), alone_state, [slot], [high - low], [done], 16)
        assert torch.equal(y[low:high], alone)
        assert torch.equal(state[slot], alone_state[slot])


def test_a_first_chunk_never_reads_its_slot() -> None:
    """B18."""
    g = generator(5)
    inputs = random_inputs(g, 20)
    dirty, clean = states(g, inputs, []), torch.zeros(SLOTS, 4, 16, 16)
    assert torch.equal(run(inputs, dirty, [1], [20], [0], 16), run(inputs, clean, [1], [20], [16], 16))
    assert torch.equal(dirty[1], clean[1])
    assert relative_error(dirty[1], recurrence(inputs)[1]) < 1e-2


def test_no_tokens() -> None:
    inputs = random_inputs(generator(0), 0)
    state = torch.ones(2, 4, 16, 16)
    assert run(inputs, state, [1], [0], [5], 16).shape == (0, 4, 16)
    assert state.eq(1).all()


def test_refusals() -> None:
    inputs = random_inputs(generator(0), 4)
    i = inputs
    rows = [torch.tensor(v, dtype=torch.int32) for v in ([0], [0, 4], [0])]

    def reason(x: Tensor = i.x, chunk_size: int = 16, state: Tensor | None = None) -> str | None:
        state = torch.zeros(1, 4, 16, 16) if state is None else state
        return unsupported(x, i.dt, i.A, i.B, i.C, i.D, i.dt_bias, state, *rows, chunk_size, NO_LIMIT)

    assert reason() is None
    assert reason(i.x.float()) == "activations are float32: the device arm computes in bfloat16"
    assert reason(chunk_size=512) == "chunks of 512 tokens: at most 256"
    for shape in ((64, 256), (80, 128), (128, 128)):
        assert reason(state=torch.empty(1, 4, *shape)) is None
    for shape in ((256, 16), (16, 257), (80, 256)):
        assert reason(state=torch.empty(1, 4, *shape)) == (
            f"a head's state is {shape[0]} x {shape[1]}: more than a tile holds"
        )
