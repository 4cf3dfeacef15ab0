"""The decode step as three launches, in the interpreter, against the reference; and who refuses it in one."""

from __future__ import annotations

import pytest
import torch

from hemiola.kernels.mamba2_update import Geometry, Tile, fitted
from hemiola.ops.device.mamba2_update import in_three, unsupported, unsupported_in_one
from hemiola.ops.mamba2_update import mamba2_update as reference
from tests.support.mamba2 import NO_LIMIT, Mamba2Inputs
from tests.support.numerics import generator, ulps
from tests.support.separation import poisoned_allocations

SLOTS = [3, -1, 0]


@pytest.mark.parametrize("dt_limit", [NO_LIMIT, (0.05, 0.2)])
@pytest.mark.parametrize("out_scale", [None, 0.013])
def test_three_launches_equal_the_reference(dt_limit: tuple[float, float], out_scale: float | None) -> None:
    i = Mamba2Inputs.random(generator(0), 3, 4, 8, 2, 16)
    slots = torch.tensor(SLOTS, dtype=torch.int32)
    states, expected_states = i.pools(5, SLOTS), i.pools(5, SLOTS)
    arguments = i.arguments(*states, slots, dt_limit, out_scale)
    assert unsupported(*arguments) is None
    with poisoned_allocations():
        out = in_three(*arguments)
    expected = reference(*i.arguments(*expected_states, slots, dt_limit, out_scale))
    assert out.dtype == expected.dtype
    assert torch.equal(states[0].isnan(), expected_states[0].isnan())
    assert torch.equal(states[0].nan_to_num(), expected_states[0].nan_to_num())
    torch.testing.assert_close(states[1], expected_states[1], rtol=1e-2, atol=1e-2, equal_nan=True)
    if out_scale is None:
        assert ulps(out, expected).max() <= 2
        assert out[1].eq(0).all()
    share = (out.view(torch.uint8) != expected.view(torch.uint8)).float().mean()
    assert share <= 0.03, "more than another order of summation explains"


def test_the_interpreter_has_no_clusters() -> None:
    i = Mamba2Inputs.random(generator(0), 1, 64, 64, 8, 128)
    arguments = i.arguments(*i.pools(1, [0]), torch.zeros(1, dtype=torch.int32))
    assert "clusters" in (unsupported_in_one(*arguments) or "")
    wide = Mamba2Inputs.random(generator(0), 1, 4, 8, 2, 16, dtype=torch.float32)
    arguments = wide.arguments(*wide.pools(1, [0]), torch.zeros(1, dtype=torch.int32))
    assert "float32" in (unsupported_in_one(*arguments) or "")
    assert "float32" in (unsupported(*arguments) or "")


@pytest.mark.parametrize(
    ("geometry", "expected"),
    [
        (Geometry(64, 8, 64), Tile(1, 8)),
        (Geometry(128, 8, 64), Tile(2, 8)),
        (Geometry(128, 8, 80), Tile(2, 8)),
        (Geometry(96, 8, 80), Tile(3, 16)),
        (Geometry(256, 8, 64), Tile(4, 16)),
        (Geometry(112, 8, 64), None),
        (Geometry(8, 2, 8), Tile(1, 8)),
        (Geometry(8, 2, 4), None),
    ],
)
def test_a_group_fills_a_cluster(geometry: Geometry, expected: Tile | None) -> None:
    assert fitted(Tile(1, 8), geometry) == expected


def test_more_heads_a_block() -> None:
    assert fitted(Tile(2, 16), Geometry(64, 8, 64)) == Tile(2, 16)
    assert fitted(Tile(4, 16), Geometry(64, 8, 64)) == Tile(4, 16)
    assert fitted(Tile(8, 8), Geometry(64, 8, 64)) is None, "2048 threads"
