"""The norm and a linear in one launch on the GPU: the residual to the bit, the product of the rows that rms_norm gives
against float64 with seeded defects, every tile, and one launch after another."""

from __future__ import annotations

import secrets

import pytest
import torch
from torch import Tensor

from hemiola.kernels.norm_linear import TILES, TOKENS, Tile, norm_linear, unsupported
from hemiola.kernels.rms_norm import rms_norm
from tests.support.separation import poisoned_allocations

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="the norm is in Triton"
    ),
]

SEED = secrets.randbelow(2**31)
EPS, ALPHA, IN_SCALE = 1e-5, 0.37, 0.011
GAP = 4.0  # how many times larger the smallest defect's error has to be
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
SIZES = [(10304, 2688), (4608, 2688), (131, 192), (37, 16), (5, 1040), (300, 4096), (96, 3136)]


def inputs(num_tokens: int, num_rows: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, residual, the norm's weight and the linear's."""
    g = torch.Generator("cuda").manual_seed(SEED)
    rows = torch.randn(2, num_tokens, hidden + 8, generator=g, device="cuda").bfloat16()
    norm_weight = (1 + 0.3 * torch.randn(hidden, generator=g, device="cuda")).bfloat16()
    weight = torch.randn(num_rows, hidden, generator=g, device="cuda") * (60 if dtype == FP8 else hidden**-0.5)
    return rows[0, :, 8:], rows[1, :, 8:], norm_weight, weight.clamp(-448, 448).to(dtype)


def relative(result: Tensor, exact: Tensor) -> float:
    return ((result.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("dtype", [FP8, BF16])
@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize(("num_rows", "hidden"), SIZES)
def test_parity(num_rows: int, hidden: int, has_residual: bool, dtype: torch.dtype) -> None:
    scale = IN_SCALE if dtype == FP8 else None
    for num_tokens in range(1, TOKENS + 1):
        x, other, norm_weight, weight = inputs(num_tokens, num_rows, hidden, dtype)
        residual = other if has_residual else None
        assert unsupported(x, residual, norm_weight, dtype) is None
        with poisoned_allocations():
            out, total = norm_linear(x, residual, norm_weight, EPS, weight, ALPHA, IN_SCALE)
        y, expected_total = rms_norm(x, residual, norm_weight, EPS, scale)
        assert torch.equal(total, expected_total)

        def product(rows: Tensor, weight: Tensor = weight) -> Tensor:
            return ALPHA * (rows.double() @ weight.double().T)

        exact = product(y)
        error = relative(out, exact)
        without_end = weight.double()
        without_end[:, -8:] = 0
        defects = {
            "another residual": product(rms_norm(x, None if has_residual else other, norm_weight, EPS, scale)[0]),
            "the last columns dropped": product(y, without_end),
            "a neighbour's row": product(y, weight.double().roll(1, 0)),
            "one row at a time behind": product(y.double().roll(8, 1)),
        }
        if dtype == FP8 and hidden > 100:
            defects["rows that are not quantised"] = product(rms_norm(x, residual, norm_weight, EPS)[0]) / IN_SCALE
        errors = {name: relative(defect, exact) for name, defect in defects.items()}
        smallest = min(errors, key=lambda name: errors[name])
        print(f"{dtype} {num_rows}x{hidden} T={num_tokens}: {error:.2e}, {smallest} {errors[smallest]:.2e}")
        assert errors[smallest] > GAP * error


@pytest.mark.parametrize("dtype", [FP8, BF16])
def test_no_bit_depends_on_the_tile_or_the_other_token(dtype: torch.dtype) -> None:
    x, residual, norm_weight, weight = inputs(2, 4608, 2688, dtype)
    expected = norm_linear(x, residual, norm_weight, EPS, weight, ALPHA, IN_SCALE)
    for tile in {*(tile for _, tile in TILES[dtype]), Tile(1, 8, 2), Tile(1, 16, 1)}:
        result = norm_linear(x, residual, norm_weight, EPS, weight, ALPHA, IN_SCALE, tile)
        assert all(map(torch.equal, result, expected)), str(tile)
    for token in range(2):
        rows = slice(token, token + 1)
        result = norm_linear(x[rows], residual[rows], norm_weight, EPS, weight, ALPHA, IN_SCALE)
        assert all(torch.equal(a, b[rows]) for a, b in zip(result, expected, strict=True))


def test_one_launch_after_another() -> None:
    """Chained, so that each starts while the one before, which writes what it reads, may run."""
    x, _, norm_weight, weight = inputs(1, 2688, 2688, BF16)

    def chain(is_waited_for: bool) -> list[Tensor]:
        rows, total = x, None
        outputs = []
        for _ in range(200):
            rows, total = norm_linear(rows, total, norm_weight, EPS, weight)
            outputs += [rows, total]
            if is_waited_for:
                torch.cuda.synchronize()
        return outputs

    expected = chain(True)
    for _ in range(5):
        assert all(map(torch.equal, chain(False), expected))
