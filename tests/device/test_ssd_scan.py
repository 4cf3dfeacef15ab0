"""SSD scan on the GPU: outputs and states against the float64 recurrence with seeded defects; splits and neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hemiola.ops.device.ssd_scan import ssd_scan
from hemiola.ops.layout import PrefillLayout
from hemiola.ops.ssd_scan import ssd_scan as reference
from tests.support.numerics import INF, generator, randn
from tests.support.separation import assert_separates, poisoned_allocations
from tests.support.ssd import SSDInputs

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

NO_LIMIT = (0.0, INF)


def inputs(num_tokens: int, heads: int, head_dim: int, groups: int, state_size: int) -> SSDInputs:
    """x, B, C and dt are slices of wider rows."""
    g = generator(num_tokens)
    i = SSDInputs.random(
        g, num_tokens, heads=heads, head_dim=head_dim, groups=groups, state_size=state_size, dtype=torch.bfloat16
    )
    flat = torch.cat([i.x.flatten(1), i.B.flatten(1), i.C.flatten(1), i.dt], 1).cuda()
    x, B, C, dt = flat.split([heads * head_dim, groups * state_size, groups * state_size, heads], 1)
    parts = (x.unflatten(1, (heads, -1)), dt, i.A.cuda(), B.unflatten(1, (groups, -1)), C.unflatten(1, (groups, -1)))
    return SSDInputs(*parts, i.D.cuda(), i.dt_bias.cuda())


def exact(
    i: SSDInputs, state: Tensor, dt_limit: tuple[float, float] = NO_LIMIT, dropped: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """One row in float64, token by token: y (T, H, P) and the last state. dropped: tokens before which it is lost."""
    per_group = i.x.shape[1] // i.B.shape[1]
    step = i.step_sizes(dt_limit)
    decay = torch.exp(i.A.double() * step)[..., None, None]
    B, C = (t.double().repeat_interleave(per_group, 1) for t in (i.B, i.C))
    scaled_x, B, C = (step[..., None] * i.x.double())[..., None], B[:, :, None], C[..., None]
    state, y = state.double().clone(), []
    for t in range(i.x.shape[0]):
        if t in dropped:
            state.zero_()
        state = torch.addcmul(decay[t] * state, scaled_x[t], B[t])
        y.append(state @ C[t])
    return torch.stack(y).squeeze(-1) + i.D.double()[:, None] * i.x.double(), state


def scan(
    function: Any,
    i: SSDInputs,
    state: Tensor,
    slots: Tensor,
    counts: Sequence[int],
    computed: Sequence[int],
    chunk_size: int,
    dt_limit: tuple[float, float] = NO_LIMIT,
) -> Tensor:
    starts = [0, *accumulate(counts)]
    layout = PrefillLayout.build(starts, computed, chunk_size, "cuda")
    rows = [torch.tensor(values, dtype=torch.int32, device="cuda") for values in (starts, computed)]
    vectors = (i.A, i.B, i.C, i.D, i.dt_bias)
    y: Tensor = function(i.x, i.dt, *vectors, state, slots, *rows, chunk_size, dt_limit, layout)
    return y


LIGHTNING = (64, 64, 8, 128)
CASES = [
    # tokens and tokens before them of each row, heads and so on, chunk, dt_limit
    ([8192], [0], LIGHTNING, 128, NO_LIMIT),
    ([1024] * 4, [0, 128, 77, 0], LIGHTNING, 128, NO_LIMIT),
    ([1, 2, 3, 130, 1, 257], [5, 0, 127, 200, 0, 128], LIGHTNING, 128, (0.05, 0.2)),
    ([300, 513], [0, 100], LIGHTNING, 256, NO_LIMIT),
    ([300, 1], [0, 100], (128, 80, 8, 128), 128, NO_LIMIT),
    ([150, 200], [7, 0], (16, 64, 2, 256), 128, NO_LIMIT),
    ([100, 33, 7], [0, 21, 16], (8, 32, 2, 16), 16, NO_LIMIT),
    ([50, 61], [0, 21], (6, 20, 3, 24), 24, NO_LIMIT),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(case: tuple[list[int], list[int], tuple[int, int, int, int], int, tuple[float, float]]) -> None:
    counts, computed, shape, chunk_size, dt_limit = case
    i, g, num_rows = inputs(sum(counts), *shape), generator(7), len(counts)
    state = torch.full((num_rows + 2, *i.x.shape[1:], shape[3]), torch.nan, device="cuda")
    slots = torch.randperm(num_rows + 2, generator=g)[:num_rows].int().cuda()
    with_state = [row for row in range(num_rows) if computed[row]]
    if with_state:
        state[slots[with_state]] = 2 * randn(g, len(with_state), *state.shape[1:]).cuda()
    before, expected_state = state[slots].nan_to_num(0.0), state.clone()
    with poisoned_allocations():
        y = scan(ssd_scan, i, state, slots, counts, computed, chunk_size, dt_limit)
    expected = scan(reference, i, expected_state, slots, counts, computed, chunk_size, dt_limit)
    assert torch.equal(state.isnan(), expected_state.isnan()), "other slots are untouched"

    longest = max(range(num_rows), key=lambda row: counts[row])
    for row in {longest, num_rows - 1}:
        low, high = sum(counts[:row]), sum(counts[: row + 1])
        part, initial = i.rows(slice(low, high)), before[row]
        edges = range(-computed[row] % chunk_size, counts[row], chunk_size)
        short = replace(part, **{n: getattr(part, n)[:1024] for n in ("x", "dt", "B", "C")})
        right, last = exact(part, initial, dt_limit)
        wrong = {
            "the next group's B": exact(replace(short, B=short.B.roll(1, 1)), initial, dt_limit),
            "no dt_bias": exact(replace(short, dt_bias=short.dt_bias * 0), initial, dt_limit),
            "the next head's A": exact(replace(short, A=short.A.roll(1)), initial, dt_limit),
        }
        if len(edges) > 1 or (len(edges) == 1 and edges[0] > 0):
            wrong["a state dropped between chunks"] = exact(short, initial, dt_limit, edges)
        if computed[row]:
            wrong["no initial state"] = exact(short, initial * 0, dt_limit)
            wrong["a neighbour's slot"] = exact(short, before[row - 1], dt_limit)
        if dt_limit != NO_LIMIT:
            wrong["no limit"] = exact(short, initial)
        of_y = {
            "no D": exact(replace(short, D=short.D * 0), initial, dt_limit),
            "the next group's C": exact(replace(short, C=short.C.roll(1, 1)), initial, dt_limit),
        }
        name, head = f"{counts[row]} tokens of {shape}", slice(low, min(high, low + 1024))
        wrong_y = {n: v[0] for n, v in (wrong | of_y).items()}
        assert_separates(f"y, {name}", y[head], expected[head], right[:1024], wrong_y)
        assert_separates(f"all of y, {name}", y[low:high], expected[low:high], right, {"half of it": right * 0.9})
        if counts[row] <= 1024:
            # What came before the last chunk may have decayed: only defects that reach the last state count.
            wrong_states = {n: v[1] for n, v in wrong.items() if n in ("the next group's B", "no dt_bias", "no limit")}
        else:
            wrong_states = {"a state dropped at the last chunk": exact(part, initial, dt_limit, edges[-1:])[1]}
        slot = slots[row]
        assert_separates(f"state, {name}", state[slot], expected_state[slot], last, wrong_states)


def test_splits_on_the_grid_keep_every_bit() -> None:
    i = inputs(700, *LIGHTNING)
    slot = torch.tensor([1], dtype=torch.int32, device="cuda")

    def piecewise(cuts: list[int]) -> tuple[Tensor, Tensor]:
        state, parts = torch.full((2, 64, 64, 128), torch.nan, device="cuda"), []
        for low, high in pairwise([0, *cuts, 700]):
            parts.append(scan(ssd_scan, i.rows(slice(low, high)), state, slot, [high - low], [low], 128))
        return torch.cat(parts), state[1]

    whole, whole_state = piecewise([])
    for cuts in ([128], [384], [128, 256, 384, 512, 640]):
        y, state = piecewise(cuts)
        assert torch.equal(y, whole)
        assert torch.equal(state, whole_state)
    assert not torch.equal(piecewise([100])[1], whole_state), "a split off the grid moves the roundings"


def test_neighbours_change_no_bit() -> None:
    counts, computed = [300, 3, 1, 513], [0, 77, 128, 100]
    i = inputs(sum(counts), *LIGHTNING)
    state = torch.randn(4, 64, 64, 128, device="cuda")
    before, slots = state.clone(), torch.tensor([2, 0, 3, 1], dtype=torch.int32, device="cuda")
    y = scan(ssd_scan, i, state, slots, counts, computed, 128)
    for row, (low, high) in enumerate(pairwise([0, *accumulate(counts)])):
        alone_state, slot = before.clone(), slots[row : row + 1]
        part = i.rows(slice(low, high))
        alone = scan(ssd_scan, part, alone_state, slot, counts[row : row + 1], computed[row : row + 1], 128)
        assert torch.equal(alone, y[low:high])
        assert torch.equal(alone_state[slot], state[slot])


def test_padded_rows() -> None:
    i = inputs(40, *LIGHTNING)
    state = torch.full((3, 64, 64, 128), torch.nan, device="cuda")
    slots = torch.tensor([-1, 1, -1], dtype=torch.int32, device="cuda")
    with poisoned_allocations():
        y = scan(ssd_scan, i, state, slots, [10, 20, 5], [0, 0, 9], 128)
    assert y[:10].eq(0).all()
    assert y[30:].eq(0).all(), "a padded row and tokens that no row owns"
    assert y[10:30].isfinite().all()
    assert state[[0, 2]].isnan().all()
