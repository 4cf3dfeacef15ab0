"""The decode step between in_proj and out_proj against float64, its padding, and its parts in their order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hemiola.formats.quant import fp8
from hemiola.ops.mamba2_update import mamba2_update
from tests.support.mamba2 import NO_LIMIT, Mamba2Inputs
from tests.support.numerics import assert_close, generator, relative_error

SLOTS = [4, -1, 0, 3]
LIVE = [0, 2, 3]


def inputs(groups: int, width: int = 4, dtype: torch.dtype = torch.float32) -> Mamba2Inputs:
    return Mamba2Inputs.random(generator(groups), 4, 8, 6, groups, 5, width, dtype)


def indices() -> torch.Tensor:
    return torch.tensor(SLOTS, dtype=torch.int32)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("dt_limit", [NO_LIMIT, (0.01, 0.1)])
def test_float32_equals_float64(groups: int, width: int, dt_limit: tuple[float, float]) -> None:
    i = inputs(groups, width)
    conv, ssm = i.pools(6, SLOTS)
    out = mamba2_update(*i.arguments(conv, ssm, indices(), dt_limit))
    part = i.rows(LIVE)
    expected, state = part.exact(dt_limit)
    assert_close(out[LIVE], expected, 1e-5)
    assert_close(ssm[[4, 0, 3]], state, 5e-6)
    assert torch.equal(conv[[4, 0, 3]], torch.cat([part.history, part.xBC[..., None]], -1)[..., 1:])
    assert out[1].eq(0).all()
    assert conv[[1, 2, 5]].isnan().all()
    assert ssm[[1, 2, 5]].isnan().all()
    if groups > 1:
        assert relative_error(out[LIVE], part.exact(dt_limit, norm_size=48)[0]) > 0.02
    if dt_limit != NO_LIMIT:
        assert relative_error(out[LIVE], part.exact()[0]) > 0.02


def test_without_a_bias() -> None:
    i = inputs(2)
    conv, ssm = i.pools(6, SLOTS)
    arguments = list(i.arguments(conv, ssm, indices()))
    arguments[4] = None
    out = mamba2_update(*arguments)
    assert_close(out[LIVE], replace(i, conv_bias=i.conv_bias * 0).rows(LIVE).exact()[0], 1e-5)


def test_codes_are_those_of_the_rounded_output() -> None:
    i = inputs(2, dtype=torch.bfloat16)
    out = mamba2_update(*i.arguments(*i.pools(6, SLOTS), indices()))
    codes = mamba2_update(*i.arguments(*i.pools(6, SLOTS), indices(), out_scale=0.013))
    assert out.dtype == torch.bfloat16
    assert torch.equal(codes.view(torch.uint8), fp8.quantize(out.float(), 0.013).view(torch.uint8))
