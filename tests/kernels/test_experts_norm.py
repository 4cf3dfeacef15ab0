"""The experts and the next layer's norm in one, in the interpreter: the op's way to the kernel, in whose place the two
run that it stands for, and what it is not for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hemiola.formats.weight import ExpertBank, Scheme, SharedExpert
from hemiola.kernels import combine_norm as kernel
from hemiola.kernels import experts as kernels
from hemiola.kernels import norm_linear, router
from hemiola.kernels.rms_norm import rms_norm
from hemiola.ops.device import experts_norm as device
from hemiola.ops.device import moe_experts
from hemiola.ops.resident import ResidentWeights
from tests.support.numerics import generator, randn, uniform
from tests.support.weights import random_weight

HIDDEN, INTER, NUM_EXPERTS, TOP_K = 64, 32, 4, 2
NORM = (1e-5, 0.011)


def given(num_tokens: int, shared_inter: int | None) -> tuple[tuple[Any, ...], Tensor, Tensor]:
    """What `moe_experts` takes, a residual and a norm's weight."""
    g, scheme = generator(num_tokens), Scheme.PLAIN

    def bank(name: str, out_size: int, in_size: int) -> ExpertBank:
        return ExpertBank(
            name, tuple(random_weight(g, f"{name}.{e}", scheme, out_size, in_size) for e in range(NUM_EXPERTS))
        )

    x, residual = randn(g, 2, num_tokens, HIDDEN, dtype=torch.bfloat16)
    ids = torch.stack([torch.randperm(NUM_EXPERTS, generator=g)[:TOP_K] for _ in range(num_tokens)]).int()
    weights = uniform(g, 0.1, 1.0, num_tokens, TOP_K)
    experts: tuple[Any, ...] = (x, ids, weights, bank("up", INTER, HIDDEN), bank("down", HIDDEN, INTER), 2.5)
    if shared_inter is not None:
        up = random_weight(g, "shared.up", scheme, shared_inter, HIDDEN)
        experts += (SharedExpert(up, random_weight(g, "shared.down", scheme, HIDDEN, shared_inter)),)
    return experts, residual, (1 + 0.3 * randn(g, HIDDEN)).bfloat16()


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("most", [64, 1], ids=["together", "apart"])
@pytest.mark.parametrize("shared_inter", [64, 48, None], ids=["joined", "beside", "none"])
def test_the_experts_end_with_the_norm(
    shared_inter: int | None, most: int, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []

    def both(
        parts: Tensor, pieces: Tensor | None, top_k: int, routed_scale: float, shared: Tensor | None, residual: Tensor,
        norm_weight: Tensor, eps: float, out_scale: float | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ends.append((0 if pieces is None else pieces.shape[1], shared is not None))
        return rms_norm(
            kernels.combine(parts, pieces, top_k, routed_scale, shared), residual, norm_weight, eps, out_scale
        )

    monkeypatch.setattr(kernel, "combine_norm", both)
    monkeypatch.setattr(moe_experts, "TOGETHER_TOKENS", dict.fromkeys(moe_experts.TOGETHER_TOKENS, most))
    experts, residual, norm_weight = given(device.FEW + 1, shared_inter)
    resident = ResidentWeights(torch.device("cpu"))
    y, total = device.run(experts, residual, norm_weight, *NORM, resident=resident, invariant=invariant)
    is_joined = shared_inter == 64
    output = moe_experts.run(*experts, joined=is_joined, resident=resident, invariant=invariant)
    expected, expected_total = rms_norm(output, residual, norm_weight, *NORM)
    assert y.dtype == torch.float8_e4m3fn
    assert torch.equal(y.float(), expected.float())
    assert torch.equal(total, expected_total)
    has_pieces = is_joined and (invariant or most > 1)
    assert ends == [(2 if has_pieces else 0, shared_inter is not None and not has_pieces)]


def test_what_it_is_not_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(num_tokens: int, has_residual: bool = True, dtype: torch.dtype = torch.bfloat16) -> str | None:
        (x, *rest), residual, norm_weight = given(num_tokens, 64)
        return device.unsupported((x.to(dtype), *rest), residual if has_residual else None, norm_weight, *NORM)

    assert reason(device.FEW + 1) == "the norm is in Triton before compute capability 9.0"
    monkeypatch.setattr(kernel, "unsupported", lambda hidden, top_k, *norm: f"{top_k} of {hidden}")
    assert reason(device.FEW + 1) == f"{TOP_K} of {HIDDEN}"
    monkeypatch.setattr(kernel, "unsupported", lambda *args: None)
    assert reason(device.FEW + 1) is None
    assert "tokens" in str(reason(device.FEW))
    assert "residual" in str(reason(device.FEW + 1, has_residual=False))
    assert "float32" in str(reason(device.FEW + 1, dtype=torch.float32))


def test_what_begins_with_the_norm_is_for_fewer_tokens() -> None:
    assert max(*router.NORM_TOKENS, norm_linear.TOKENS) <= device.FEW


@pytest.mark.parametrize(("num_tokens", "invariant"), [(0, False), (0, True), (1, False), (device.FEW, False)])
def test_few_tokens_have_no_sum_to_take_the_place_of(num_tokens: int, invariant: bool) -> None:
    experts, *_ = given(max(num_tokens, 1), None)
    x, ids, weights, *banks = experts
    rows = (x[:num_tokens], ids[:num_tokens], weights[:num_tokens])
    resident = ResidentWeights(torch.device("cpu"))
    with pytest.raises(AssertionError, match="no sum"):
        moe_experts.run(*rows, *banks, joined=False, resident=resident, invariant=invariant, end=kernels.combine)
