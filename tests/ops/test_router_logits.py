"""Router logits: unrounded float32, and what the gate weight is rounded to."""

from __future__ import annotations

import pytest
import torch

from hemiola.ops.kept import KeptForms
from hemiola.ops.router_logits import router_logits
from tests.support.numerics import assert_close, bf16, generator, randn, relative_error
from tests.support.weights import plain_weight


@pytest.mark.parametrize("num_tokens", [1, 15, 17])
@pytest.mark.parametrize("activations", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16])
def test_float32_result_with_the_gate_rounded_as_asked(
    num_tokens: int, activations: torch.dtype, stored: torch.dtype, gate_dtype: torch.dtype
) -> None:
    g = generator(num_tokens)
    x, gate = randn(g, num_tokens, 65, dtype=activations), randn(g, 9, 65, dtype=stored)
    kept = KeptForms(1 << 30)
    result = router_logits(x, plain_weight("gate", gate), gate_dtype, kept=kept)
    rounded, exact = (x.double() @ w.T for w in (bf16(gate.double()), gate.double()))
    right, wrong = (rounded, exact) if gate_dtype == torch.bfloat16 else (exact, rounded)
    assert result.dtype == torch.float32
    assert_close(result, right, 1e-6)
    if stored == torch.float32:
        assert relative_error(result, wrong) > 1e-4
    assert relative_error(bf16(result.double()), right) > 1e-5, "logits rounded to bf16 would show"
    converted = gate_dtype == torch.bfloat16 or stored == torch.bfloat16
    assert kept.kept_bytes == (9 * 65 * 4 if converted else 0)


def test_the_two_roundings_of_one_gate_are_kept_apart() -> None:
    g, kept = generator(0), KeptForms(1 << 30)
    x, gate = randn(g, 4, 32), plain_weight("gate", randn(g, 8, 32, dtype=torch.float16))
    for _ in range(2):
        for dtype, weight in ((torch.float32, gate.data.double()), (torch.bfloat16, bf16(gate.data.double()))):
            assert_close(router_logits(x, gate, dtype, kept=kept), x.double() @ weight.T, 1e-6)
    assert kept.kept_bytes == 2 * 8 * 32 * 4


def test_a_row_alone_equals_the_row_in_a_batch() -> None:
    g, kept = generator(1), KeptForms(1 << 30)
    gate = plain_weight("gate", torch.randint(-8, 9, (8, 32), generator=g).float())
    x = torch.randint(-8, 9, (9, 32), generator=g).float()  # exact sums
    together = router_logits(x, gate, torch.float32, kept=kept)
    for row in range(9):
        assert torch.equal(router_logits(x[row : row + 1], gate, torch.float32, kept=kept)[0], together[row])
