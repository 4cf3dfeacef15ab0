"""SSD update on the GPU: outputs and states against float64 with seeded defects; rows alone and in a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hemiola.kernels.ssd_update import ssd_update
from hemiola.ops.ssd_update import ssd_update as reference
from tests.support.numerics import INF, generator, randn
from tests.support.separation import assert_separates, poisoned_allocations
from tests.support.ssd import SSDInputs

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

NO_LIMIT = (0.0, INF)


def inputs(num_rows: int, heads: int, head_dim: int, groups: int, state_size: int) -> SSDInputs:
    """x, B and C are slices of the convolution's output, dt of in_proj's."""
    g = generator(num_rows)
    i = SSDInputs.random(
        g, num_rows, heads=heads, head_dim=head_dim, groups=groups, state_size=state_size, dtype=torch.bfloat16
    )
    flat = torch.cat([i.x.flatten(1), i.B.flatten(1), i.C.flatten(1), i.dt], 1).cuda()
    x, B, C, dt = flat.split([heads * head_dim, groups * state_size, groups * state_size, heads], 1)
    parts = (x.unflatten(1, (heads, -1)), dt, i.A.cuda(), B.unflatten(1, (groups, -1)), C.unflatten(1, (groups, -1)))
    return SSDInputs(*parts, i.D.cuda(), i.dt_bias.cuda())


def exact(i: SSDInputs, state: Tensor, dt_limit: tuple[float, float] = NO_LIMIT) -> tuple[Tensor, Tensor]:
    """One step of every row in float64: y (R, H, P) and the new state (R, H, P, N)."""
    per_group = i.x.shape[1] // i.B.shape[1]
    step = i.step_sizes(dt_limit)
    B, C = (t.double().repeat_interleave(per_group, 1) for t in (i.B, i.C))
    decay = torch.exp(i.A.double() * step)[..., None, None]
    new = decay * state.double() + i.x.double()[..., None] * (step[..., None] * B)[:, :, None]
    return (new @ C[..., None]).squeeze(-1) + i.D.double()[:, None] * i.x.double(), new


SHAPES = [
    (1, 64, 64, 8, 128),
    (8, 64, 64, 8, 128),
    (128, 64, 64, 8, 128),
    (5, 128, 80, 8, 128),
    (3, 16, 64, 2, 256),
    (4, 8, 32, 2, 16),
    (3, 6, 20, 3, 24),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dt_limit", [NO_LIMIT, (0.05, 0.2)])
def test_parity(shape: tuple[int, int, int, int, int], dt_limit: tuple[float, float]) -> None:
    i, num_rows = inputs(*shape), shape[0]
    g = generator(7)
    state = torch.full((num_rows + 3, *i.x.shape[1:], shape[4]), torch.nan, device="cuda")
    slots = torch.randperm(num_rows + 3, generator=g)[:num_rows].int().cuda()
    state[slots] = randn(g, num_rows, *state.shape[1:]).cuda()
    if num_rows > 1:
        slots[1] = -1
    live = slots >= 0
    before, expected_state = state[slots[live]], state.clone()
    rest = (i.A, i.B, i.C, i.D, i.dt_bias)
    with poisoned_allocations():
        y = ssd_update(i.x, i.dt, *rest, state, slots, dt_limit)
    expected = reference(i.x, i.dt, *rest, expected_state, slots, dt_limit)
    assert y[~live].eq(0).all()
    assert torch.equal(state.isnan(), expected_state.isnan()), "other slots are untouched"

    part = replace(i, x=i.x[live], dt=i.dt[live], B=i.B[live], C=i.C[live])
    wrong = {
        "a dropped state": exact(part, before * 0, dt_limit),
        "the next group's B": exact(replace(part, B=part.B.roll(1, 1)), before, dt_limit),
        "no dt_bias": exact(replace(part, dt_bias=part.dt_bias * 0), before, dt_limit),
        "no decay": exact(replace(part, A=part.A * 0), before, dt_limit),
        "the next head's A": exact(replace(part, A=part.A.roll(1)), before, dt_limit),
    }
    if num_rows > 2:
        wrong["a neighbour's slot"] = exact(part, before.roll(1, 0), dt_limit)
    if dt_limit != NO_LIMIT:
        wrong["no limit"] = exact(part, before)
    of_y = {
        "no D": exact(replace(part, D=part.D * 0), before, dt_limit),
        "the next group's C": exact(replace(part, C=part.C.roll(1, 1)), before, dt_limit),
    }
    right, new_state = exact(part, before, dt_limit)
    assert_separates(f"y {shape}", y[live], expected[live], right, {n: v[0] for n, v in (wrong | of_y).items()})
    new = state[slots[live]], expected_state[slots[live]]
    wrong_states = {n: v[1] for n, v in wrong.items()}
    wrong_states["a state kept in bfloat16"] = new_state.float().bfloat16()
    assert_separates(f"state {shape}", *new, new_state, wrong_states)


def test_neighbours_change_no_bit() -> None:
    """Few rows and many take other tiles."""
    i = inputs(256, 64, 64, 8, 128)
    rest = (i.A, i.D, i.dt_bias)
    state = torch.randn(256, 64, 64, 128, device="cuda")
    before, slots = state.clone(), torch.arange(256, dtype=torch.int32, device="cuda")

    def run(part: SSDInputs, state: Tensor, slots: Tensor) -> Tensor:
        return ssd_update(part.x, part.dt, rest[0], part.B, part.C, rest[1], rest[2], state, slots)

    y = run(i, state, slots)
    for low, high in ((0, 1), (17, 25), (30, 94)):
        alone_state = before.clone()
        alone = run(i.rows(slice(low, high)), alone_state, slots[low:high])
        assert torch.equal(alone, y[low:high])
        assert torch.equal(alone_state[low:high], state[low:high])
