"""The mamba2 mixer's gated group norm: gate first, one mean per group, and where it rounds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hemiola.ops.gated_rms_norm import gated_rms_norm
from tests.support.numerics import assert_close, assert_ledger, bf16, generator, randn, relative_error, uniform

EPS = 1e-5


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def normalised(v: Tensor, group_size: int) -> Tensor:
    """float64, group by group."""
    parts = []
    for low in range(0, v.shape[1], group_size):
        part = v[:, low : low + group_size]
        parts.append(part / torch.sqrt((part * part).sum(1, keepdim=True) / group_size + EPS))
    return torch.cat(parts, 1)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 53])
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_float32_equals_float64_and_the_group_size_shows(groups: int, num_tokens: int) -> None:
    g = generator(groups)
    inner = 64
    # Channels of different sizes, so that the groups' means differ.
    y, z = randn(g, num_tokens, inner) * torch.linspace(0.2, 3, inner), randn(g, num_tokens, inner)
    weight = uniform(g, 0.5, 1.5, inner)
    v = y.double() * silu(z.double())
    out = gated_rms_norm(y, z, weight, inner // groups, EPS)
    assert_close(out, normalised(v, inner // groups) * weight.double(), 1e-6)

    full_width = normalised(v, inner) * weight.double()
    assert (relative_error(out, full_width) > 0.05) == (groups > 1)
    norm_first = normalised(y.double(), inner // groups) * weight.double() * silu(z.double())
    assert relative_error(out, norm_first) > 0.05


def test_epsilon_is_inside_the_root() -> None:
    """Gated values of 1e-3: the epsilon is ten times their mean square."""
    z = torch.full((1, 8), 30.0)
    y = torch.full((1, 8), 1e-3) / 30
    assert_close(gated_rms_norm(y, z, torch.ones(8), 8, EPS), torch.full((1, 8), 1e-3 / 1.1e-5**0.5), 1e-6)


def test_bf16_ledger() -> None:
    """float32 from the gate to the normalised value, which is rounded before the weight."""
    g = generator(2)
    y, z = randn(g, 40, 64, dtype=torch.bfloat16), randn(g, 40, 64, dtype=torch.bfloat16)
    weight = uniform(g, 0.5, 1.5, 64).bfloat16()
    v, w = y.double() * silu(z.double()), weight.double()
    assert_ledger(
        gated_rms_norm(y, z, weight, 32, EPS),
        bf16(normalised(v, 32)) * w,
        {
            "no rounding before the weight": normalised(v, 32) * w,
            "a rounded product with the gate": bf16(normalised(bf16(v), 32)) * w,
            "a rounded gate": bf16(normalised(y.double() * bf16(silu(z.double())), 32)) * w,
        },
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_alone_equals_the_row_in_a_batch(dtype: torch.dtype) -> None:
    g = generator(3)
    y, z, weight = randn(g, 9, 64, dtype=dtype), randn(g, 9, 64, dtype=dtype), randn(g, 64, dtype=dtype)
    together = gated_rms_norm(y, z, weight, 16, EPS)
    for row in range(9):
        assert torch.equal(gated_rms_norm(y[row : row + 1], z[row : row + 1], weight, 16, EPS)[0], together[row])
