"""Router kernels on a GPU: logits against float64, the choice against the reference's, at real and odd sizes."""

from __future__ import annotations

import secrets

import pytest
import torch

from hemiola.kernels import router
from hemiola.ops.moe_route import moe_route as reference

SEED = secrets.randbelow(2**31)
GAP = 4.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_experts", "hidden"), [(128, 2688), (512, 4096), (5, 80)])
def test_logits(num_experts: int, hidden: int, dtype: torch.dtype) -> None:
    g = torch.Generator("cuda").manual_seed(SEED)
    gate = (torch.randn(num_experts, hidden, generator=g, device="cuda") * hidden**-0.5).to(dtype)
    for num_tokens in (1, 3, 8, 9, 65, 256, 1500):
        x = torch.randn(num_tokens, hidden + 16, generator=g, device="cuda").bfloat16()[:, 16:]
        exact = x.double() @ gate.double().T
        for invariant in (False, True):
            torch.full(exact.shape, torch.nan, device="cuda")
            error = (router.router_logits(x, gate, invariant=invariant).double() - exact).abs().max().item()
            defects = {
                "rounded to bfloat16": exact.bfloat16().double(),
                "last columns dropped": exact - x[:, -16:].double() @ gate[:, -16:].double().T,
            }
            if dtype == torch.float32:
                defects["a gate in bfloat16"] = x.double() @ gate.bfloat16().double().T
            errors = {name: (other - exact).abs().max().item() for name, other in defects.items()}
            smallest = min(errors, key=lambda name: errors[name])
            print(f"{dtype} {num_experts}x{hidden} T={num_tokens}: {error:.2e}, {smallest} {errors[smallest]:.2e}")
            assert errors[smallest] > GAP * error


def test_invariant_rows_do_not_depend_on_their_neighbours() -> None:
    g = torch.Generator("cuda").manual_seed(SEED)
    for dtype in (torch.bfloat16, torch.float32):
        gate = torch.randn(128, 2688, generator=g, device="cuda").to(dtype)
        x = torch.randn(2000, 2688, generator=g, device="cuda").bfloat16()
        together = router.router_logits(x, gate, invariant=True)
        for some in (slice(0, 1), slice(7, 15), slice(100, 1300)):
            assert torch.equal(router.router_logits(x[some], gate, invariant=True), together[some])


@pytest.mark.parametrize(
    ("num_experts", "top_k", "groups", "taken"), [(128, 6, 1, 1), (512, 22, 1, 1), (24, 3, 3, 2), (5, 5, 1, 1)]
)
def test_the_choice(num_experts: int, top_k: int, groups: int, taken: int) -> None:
    g = torch.Generator("cuda").manual_seed(SEED)
    bias = torch.randn(num_experts, generator=g, device="cuda") * 0.1
    for num_tokens in (1, 77, 3000):
        logits = torch.randn(num_tokens, num_experts, generator=g, device="cuda")
        ids, weights = router.moe_route(logits, bias, top_k, groups, taken, True)
        expected_ids, expected_weights = reference(logits, bias, top_k, groups, taken, True)
        # A last bit of the sigmoid may order two scores that are a last bit apart.
        share = (ids.long() != expected_ids).double().mean().item()
        print(f"{num_experts} experts, {num_tokens} tokens: {share:.2e} of the choices differ")
        assert share < 1e-3
        same = ids.long() == expected_ids
        torch.testing.assert_close(weights[same], expected_weights[same], rtol=1e-5, atol=0)


def test_ties_go_to_the_lower_id() -> None:
    g = torch.Generator("cuda").manual_seed(SEED)
    logits = torch.randint(-1, 2, (500, 128), generator=g, device="cuda").float()
    ids, _ = router.moe_route(logits, torch.zeros(128, device="cuda"), 6, 1, 1, True)
    assert torch.equal(ids.long(), logits.sort(dim=1, descending=True, stable=True).indices[:, :6])
