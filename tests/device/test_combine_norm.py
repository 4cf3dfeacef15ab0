"""A token's experts summed and normed in one launch on the GPU: the bits of `combine` and then `rms_norm`, which every
seeded defect changes; rows alone and in a batch; one launch after another."""

from __future__ import annotations

import secrets
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from hemiola.kernels.combine_norm import MOST_EXPERTS, combine_norm, unsupported
from hemiola.kernels.experts import combine
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
EPS, ROUTED_SCALE, OUT_SCALE = 1e-5, 2.5, 0.0131
TOKENS = (5, 8, 32, 33, 64, 300)
SIZES = [(2688, 6), (4096, MOST_EXPERTS), (8192, 2), (256, 3), (192, 6), (80, 1)]


class Inputs(NamedTuple):
    parts: Tensor
    pieces: Tensor | None
    top_k: int
    routed_scale: float
    shared: Tensor | None
    residual: Tensor
    norm_weight: Tensor

    def rows(self, low: int, high: int) -> Inputs:
        """Of some tokens."""
        pairs = len(self.parts) // len(self.residual)
        return self._replace(
            parts=self.parts[low * pairs : high * pairs],
            pieces=None if self.pieces is None else self.pieces[low:high],
            shared=None if self.shared is None else self.shared[low:high],
            residual=self.residual[low:high],
        )


def inputs(num_tokens: int, hidden: int, top_k: int, kind: str) -> Inputs:
    """kind: how the shared expert's part comes. What no pair of the routing's writes is NaN."""
    g = torch.Generator("cuda").manual_seed(SEED + num_tokens)
    num_shared = 2 if kind == "pieces" else 0
    parts = torch.randn(num_tokens, top_k + num_shared, hidden, generator=g, device="cuda").bfloat16()
    parts[:, top_k:] = torch.nan
    pieces = torch.randn(num_tokens, 2, hidden, generator=g, device="cuda") if num_shared else None
    rows = torch.randn(2, num_tokens, hidden + 8, generator=g, device="cuda").bfloat16()
    norm_weight = (1 + 0.3 * torch.randn(hidden, generator=g, device="cuda")).bfloat16()
    shared = rows[0, :, 8:] if kind == "row" else None
    return Inputs(parts.flatten(0, 1), pieces, top_k, ROUTED_SCALE, shared, rows[1, :, :hidden], norm_weight)


def two(given: Inputs, out_scale: float | None) -> tuple[Tensor, Tensor]:
    *experts, residual, norm_weight = given
    return rms_norm(combine(*experts), residual, norm_weight, EPS, out_scale)


def equal(result: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> list[bool]:
    """By bits."""
    return [
        a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(result, expected, strict=True)
    ]


def seeded(given: Inputs) -> dict[str, Inputs]:
    """Inputs whose results are those of kernels with one thing wrong."""
    parts = given.parts.view(len(given.residual), -1, given.parts.shape[1])
    without_last, swapped = parts.clone(), parts.clone()
    without_last[:, given.top_k - 1] = 0
    swapped[0], swapped[1] = parts[1], parts[0]
    defects = {
        "the last expert dropped": given._replace(parts=without_last.flatten(0, 1)),
        "a neighbour's experts": given._replace(parts=swapped.flatten(0, 1)),
        "no scale of the sum": given._replace(routed_scale=1.0),
        "a neighbour's residual": given._replace(residual=given.residual.roll(1, 0)),
    }
    if given.pieces is not None:
        half = given.pieces.clone()
        half[:, 1] = 0
        defects["half of the shared part"] = given._replace(pieces=half)
    if given.shared is not None:
        defects["no shared part"] = given._replace(shared=None)
    return defects


@pytest.mark.parametrize("out_scale", [None, OUT_SCALE], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("kind", ["pieces", "row", "neither"])
@pytest.mark.parametrize(("hidden", "top_k"), SIZES)
def test_the_bits_of_the_two(hidden: int, top_k: int, kind: str, out_scale: float | None) -> None:
    for num_tokens in TOKENS:
        given = inputs(num_tokens, hidden, top_k, kind)
        assert unsupported(hidden, top_k, given.residual, given.norm_weight) is None
        with poisoned_allocations():
            result = combine_norm(*given, EPS, out_scale)
        assert equal(result, two(given, out_scale)) == [True, True], num_tokens
        for name, defect in seeded(given).items():
            assert equal(result, two(defect, out_scale)) == [False, False], (num_tokens, name)
        weight = given._replace(norm_weight=given.norm_weight.roll(1))
        assert equal(result, two(weight, out_scale)) == [False, True]
        assert equal(result, rms_norm(result[1], None, given.norm_weight, EPS, out_scale)) == [True, True]


def test_values_of_any_size() -> None:
    """Sums that overflow, cancel, and are subnormal; infinities and NaN."""
    given = inputs(64, 2688, 6, "row")
    parts = given.parts.view(64, 6, 2688)
    for token, size in enumerate((1e-40, 1e-38, 1e-20, 1e20, 1e38, 3e38)):
        parts[token] = (parts[token].float() * size).bfloat16()
        given.residual[token] = (given.residual[token].float() * size).bfloat16()
    parts[8, 3, 17], parts[9, 0, 2000], parts[10, 5, 1] = torch.inf, torch.nan, -torch.inf
    parts[11, 1] = -parts[11, 0]
    parts[12] = -0.0
    for out_scale in (None, OUT_SCALE, 1e-5):
        assert equal(combine_norm(*given, EPS, out_scale), two(given, out_scale)) == [True, True]


@pytest.mark.parametrize("kind", ["pieces", "row", "neither"])
def test_neighbours_change_no_bit(kind: str) -> None:
    given = inputs(300, 2688, 6, kind)
    whole = combine_norm(*given, EPS, OUT_SCALE)
    for low, high in ((0, 5), (17, 24), (40, 104), (172, 300)):
        alone = combine_norm(*given.rows(low, high), EPS, OUT_SCALE)
        assert equal(alone, (whole[0][low:high], whole[1][low:high])) == [True, True]


def test_one_launch_after_another() -> None:
    """Chained, so that each starts while the one before, which writes what it reads, may run."""
    given = inputs(32, 2688, 1, "row")

    def chain(is_waited_for: bool) -> list[Tensor]:
        now, outputs = given, []
        for _ in range(200):
            y, total = combine_norm(*now, EPS, None)
            now = now._replace(parts=y, residual=total, shared=y)
            outputs += [y, total]
            if is_waited_for:
                torch.cuda.synchronize()
        return outputs

    expected = chain(True)
    for _ in range(5):
        assert all(map(torch.equal, chain(False), expected))
