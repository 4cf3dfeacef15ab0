"""The decode step in one launch on the GPU: outputs and states against float64 with seeded defects, every tile's bits,
rows alone and in a batch, and states that are read early behind the launches that a layer has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from hemiola.formats.quant import fp8
from hemiola.kernels.linear_bf16 import linear_bf16
from hemiola.kernels.mamba2_update import TILES, Geometry, Tile, fitted, mamba2_update
from hemiola.kernels.norm_linear import norm_linear
from hemiola.kernels.rms_norm import rms_norm
from hemiola.ops.device.mamba2_update import in_three, unsupported_in_one
from hemiola.ops.mamba2_update import mamba2_update as reference
from tests.support.mamba2 import EPS, NO_LIMIT, Mamba2Inputs
from tests.support.numerics import generator
from tests.support.separation import assert_separates, poisoned_allocations

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs clusters of blocks"
    ),
]

LIGHTNING = (64, 64, 8, 128)  # heads, head_dim, groups, state_size
ALL_TILES = [
    Tile(h, r, s) for (h, r), s in product(((1, 4), (1, 8), (1, 16), (2, 4), (2, 8), (2, 16), (4, 8)), (True, False))
]
SHAPES = [
    (1, *LIGHTNING),
    (5, *LIGHTNING),
    (130, *LIGHTNING),
    (3, 128, 64, 8, 128),
    (3, 128, 80, 8, 128),
    (2, 96, 80, 8, 128),
    (2, 256, 64, 8, 128),
    (4, 4, 16, 2, 128),
    (4, 2, 8, 2, 128),
]


def rolled(i: Mamba2Inputs, **shifts: int) -> Mamba2Inputs:
    return replace(i, **{name: getattr(i, name).roll(shift, -1) for name, shift in shifts.items()})


def on_device(*shape: int) -> tuple[Mamba2Inputs, Tensor]:
    """Inputs, and slots of which one is inert where there are more rows than one."""
    g = generator(shape[0])
    i = Mamba2Inputs.random(g, *shape).cuda()
    slots = torch.randperm(shape[0] + 3, generator=g)[: shape[0]].int()
    if shape[0] > 1:
        slots[1] = -1
    return i, slots.cuda()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dt_limit", [NO_LIMIT, (0.05, 0.2)])
def test_parity(shape: tuple[int, int, int, int, int], dt_limit: tuple[float, float]) -> None:
    i, slots = on_device(*shape)
    live = slots >= 0
    conv, ssm = i.pools(shape[0] + 3, slots.tolist())
    expected_conv, expected_ssm = conv.clone(), ssm.clone()
    arguments = i.arguments(conv, ssm, slots, dt_limit)
    assert unsupported_in_one(*arguments) is None
    torch.cuda.synchronize()
    with poisoned_allocations():
        out = mamba2_update(*arguments)
    expected = reference(*i.arguments(expected_conv, expected_ssm, slots, dt_limit))
    assert out[~live].eq(0).all()
    assert torch.equal(conv.view(torch.int16), expected_conv.view(torch.int16))
    assert torch.equal(ssm.isnan(), expected_ssm.isnan()), "other slots are untouched"

    part = i.rows(live)
    right, new_state = part.exact(dt_limit)
    inner = i.z.shape[1]
    sides = part.xBC[:, inner:].unflatten(1, (2, i.groups, -1))
    wrong = {
        "a dropped state": replace(part, state=part.state * 0).exact(dt_limit),
        "no history": replace(part, history=part.history * 0).exact(dt_limit),
        "taps reversed": replace(part, conv_weight=part.conv_weight.flip(1)).exact(dt_limit),
        "no bias of the convolution": replace(part, conv_bias=part.conv_bias * 0).exact(dt_limit),
        "the next head's dt": rolled(part, dt=1).exact(dt_limit),
        "no decay": replace(part, A=part.A * 0).exact(dt_limit),
        "B and C exchanged": replace(part, xBC=torch.cat([part.xBC[:, :inner], sides.flip(1).flatten(1)], 1)).exact(
            dt_limit
        ),
    }
    of_output = {
        "no D": replace(part, D=part.D * 0).exact(dt_limit)[0],
        "the next channel's weight": rolled(part, norm_weight=1).exact(dt_limit)[0],
        "the next head's gate": rolled(part, z=shape[2]).exact(dt_limit)[0],
        "another group norm": part.exact(dt_limit, norm_size=shape[2] if i.group_size > shape[2] else inner)[0],
    }
    if shape[0] > 2:
        wrong["a neighbour's state"] = replace(part, state=part.state.roll(1, 0)).exact(dt_limit)
    if dt_limit != NO_LIMIT:
        wrong["no limit"] = part.exact()
    outputs = {name: value[0] for name, value in wrong.items()} | of_output
    assert_separates(f"out {shape}", out[live], expected[live], right, outputs)
    new = ssm[slots[live].long()], expected_ssm[slots[live].long()]
    by_head = [state.flatten(2) for state in (*new, new_state)]
    assert_separates(f"state {shape}", *by_head, {name: value[1].flatten(2) for name, value in wrong.items()})
    # Beside the reference only a rounding here and there falls the other way, and what follows from it.
    apart = ((new[0] - new[1]).abs() > 1e-5 * new[1].abs() + 1e-6).float().mean()
    assert apart <= 0.02, f"{apart:.2%} of the state's elements"
    assert (out[live] != expected[live]).float().mean() <= 0.05


@pytest.mark.parametrize("out_scale", [0.1, 1e-5])
def test_codes(out_scale: float) -> None:
    i, slots = on_device(9, *LIGHTNING)
    pools = [i.pools(12, slots.tolist()) for _ in range(2)]
    torch.cuda.synchronize()
    with poisoned_allocations():
        codes = mamba2_update(*i.arguments(*pools[0], slots, out_scale=out_scale))
    out = mamba2_update(*i.arguments(*pools[1], slots))
    assert torch.equal(codes.view(torch.uint8), fp8.quantize(out.float(), out_scale).view(torch.uint8))
    assert (codes.float().abs().max() == 448) == (out_scale < 1e-3)


def test_three_launches_give_the_same() -> None:
    i, slots = on_device(17, *LIGHTNING)
    pools = [i.pools(20, slots.tolist()) for _ in range(2)]
    torch.cuda.synchronize()
    out = mamba2_update(*i.arguments(*pools[0], slots))
    other = in_three(*i.arguments(*pools[1], slots))
    assert torch.equal(pools[0][0].view(torch.int16), pools[1][0].view(torch.int16))
    assert (out != other).float().mean() <= 0.02
    torch.testing.assert_close(pools[0][1], pools[1][1], rtol=1e-2, atol=1e-2, equal_nan=True)


@pytest.mark.parametrize("has_bias", [True, False])
def test_without_a_bias_and_with_a_row_of_its_own(has_bias: bool) -> None:
    """A row whose stride says nothing: what is left of one row is contiguous."""
    i, slots = on_device(1, *LIGHTNING)
    pools = [i.pools(4, slots.tolist()) for _ in range(2)]
    arguments = [list(i.arguments(*pool, slots)) for pool in pools]
    for values in arguments:
        values[:3] = [value.clone() for value in values[:3]]
        if not has_bias:
            values[4] = None
    torch.cuda.synchronize()
    out, expected = mamba2_update(*arguments[0]), reference(*arguments[1])
    assert (out != expected).float().mean() <= 0.05


def test_no_bit_depends_on_the_tile() -> None:
    i, slots = on_device(6, *LIGHTNING)
    results = []
    for tile in (None, *ALL_TILES):
        conv, ssm = i.pools(9, slots.tolist())
        torch.cuda.synchronize()
        out = mamba2_update(*i.arguments(conv, ssm, slots), tile=tile)
        results.append((out, conv.view(torch.int16), ssm.nan_to_num()))
    for tile, result in zip(ALL_TILES, results[1:], strict=True):
        assert all(map(torch.equal, result, results[0])), str(tile)
    assert all(fitted(tile, Geometry(64, 8, 64)) for _, tile in TILES)


def test_neighbours_change_no_bit() -> None:
    i = Mamba2Inputs.random(generator(0), 256, *LIGHTNING).cuda()
    slots = torch.arange(256, dtype=torch.int32, device="cuda")
    conv, ssm = i.history.clone(), i.state.clone()
    torch.cuda.synchronize()
    out = mamba2_update(*i.arguments(conv, ssm, slots))
    for low, high in ((0, 1), (17, 25), (30, 94)):
        alone = i.history.clone(), i.state.clone()
        torch.cuda.synchronize()
        part = mamba2_update(*i.rows(slice(low, high)).arguments(*alone, slots[low:high]))
        assert torch.equal(part, out[low:high])
        assert torch.equal(alone[0][low:high], conv[low:high])
        assert torch.equal(alone[1][low:high], ssm[low:high])


@pytest.mark.parametrize(("num_rows", "is_joined"), [(1, False), (4, False), (40, False), (1, True), (2, True)])
def test_states_that_are_read_early_are_the_last_ones(num_rows: int, is_joined: bool) -> None:
    """A layer's steps in a graph, with dependent launches: the norm, in_proj, the update, each on what is before it.
    With the norm in in_proj a single launch lies between two updates."""
    i = Mamba2Inputs.random(generator(num_rows), num_rows, *LIGHTNING).cuda()
    hidden, width = 256, i.z.shape[1] + i.xBC.shape[1] + i.dt.shape[1]
    g = torch.Generator("cuda").manual_seed(1)
    weight = torch.randn(width, hidden, device="cuda", generator=g).bfloat16() / 16
    norm = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
    first = torch.randn(num_rows, hidden, device="cuda", generator=g).bfloat16()
    slots = torch.arange(num_rows, dtype=torch.int32, device="cuda")

    def steps(conv: Tensor, ssm: Tensor, between: Callable[[], object]) -> list[Tensor]:
        x, outputs = first, []
        for _ in range(12):
            if is_joined:
                projected, _ = norm_linear(x, None, norm, EPS, weight)
            else:
                projected = linear_bf16(rms_norm(x, None, norm, EPS)[0], weight, invariant=True)
            z, xBC, dt = projected.split([i.z.shape[1], i.xBC.shape[1], i.dt.shape[1]], 1)
            between()
            out = mamba2_update(*replace(i, z=z, xBC=xBC, dt=dt).arguments(conv, ssm, slots))
            between()
            x = out[:, :hidden]
            outputs.append(out)
        return outputs

    conv, ssm = i.history.clone(), i.state.clone()
    expected = steps(conv, ssm, torch.cuda.synchronize)
    own = i.history.clone(), i.state.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = steps(*own, lambda: None)
    for _ in range(5):
        own[0].copy_(i.history)
        own[1].copy_(i.state)
        graph.replay()
        assert all(map(torch.equal, outputs, expected))
        assert torch.equal(own[0], conv)
        assert torch.equal(own[1], ssm)
