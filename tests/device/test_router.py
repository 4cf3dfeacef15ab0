"""Router kernels on a GPU: logits against float64, the choice against the reference's, at real and odd sizes; the
kernel of both at once, alike."""

from __future__ import annotations

import secrets

import pytest
import torch

from hemiola.kernels import router
from hemiola.kernels.rms_norm import rms_norm
from hemiola.ops.moe_route import choice as reference
from tests.support.separation import poisoned_allocations

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


@pytest.fixture
def clusters() -> None:
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("needs clusters of blocks")


FUSED_SIZES = [(128, 2688, 6, 1, 1), (512, 4096, 22, 1, 1), (24, 80, 3, 3, 2), (5, 1000, 5, 1, 1), (64, 136, 4, 8, 3)]


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize(("num_experts", "hidden", "top_k", "groups", "taken"), FUSED_SIZES)
def test_both_at_once(num_experts: int, hidden: int, top_k: int, groups: int, taken: int) -> None:
    g = torch.Generator("cuda").manual_seed(SEED)
    gate = (torch.randn(num_experts, hidden, generator=g, device="cuda") * hidden**-0.5).bfloat16()
    bias = torch.randn(num_experts, generator=g, device="cuda") * 0.1
    for num_tokens in (1, 3, 8, 9, 65, 200, 256, 512):
        x = torch.randn(num_tokens, hidden + 16, generator=g, device="cuda").bfloat16()[:, 16:]
        assert router.takes_fused(x, gate, top_k)
        exact = x.double() @ gate.double().T
        torch.full(exact.shape, torch.nan, device="cuda")
        ids, weights, logits = router.route(x, gate, bias, top_k, groups, taken, True)
        error = (logits.double() - exact).abs().max().item()
        eighth = hidden // 8
        defects = {
            "rounded to bfloat16": exact.bfloat16().double(),
            "last columns dropped": exact - x[:, -8:].double() @ gate[:, -8:].double().T,
            "a block's part twice": exact + x[:, :eighth].double() @ gate[:, :eighth].double().T,
            "another token's": exact.roll(1, 0) if num_tokens > 1 else exact + 1,
        }
        errors = {name: (other - exact).abs().max().item() for name, other in defects.items()}
        smallest = min(errors, key=lambda name: errors[name])
        print(f"{num_experts}x{hidden} T={num_tokens}: {error:.2e}, {smallest} {errors[smallest]:.2e}")
        assert errors[smallest] > GAP * error
        expected_ids, expected_weights = reference(logits, bias, top_k, groups, taken, True)
        # A last bit of the sigmoid may order two scores that are a last bit apart.
        same = ids.long() == expected_ids
        assert (~same).double().mean().item() < 1e-3
        torch.testing.assert_close(weights[same], expected_weights[same], rtol=1e-5, atol=0)
        unbiased = reference(logits, torch.zeros_like(bias), top_k, groups, taken, True)[0]
        assert num_tokens < 8 or top_k == num_experts or not torch.equal(ids.long(), unbiased)


@pytest.mark.usefixtures("clusters")
def test_both_at_once_do_not_depend_on_other_tokens() -> None:
    g = torch.Generator("cuda").manual_seed(SEED)
    for num_experts, hidden, top_k in ((128, 2688, 6), (512, 4096, 22)):
        gate = torch.randn(num_experts, hidden, generator=g, device="cuda").bfloat16() * hidden**-0.5
        bias = torch.randn(num_experts, generator=g, device="cuda") * 0.1
        x = torch.randn(2000, hidden, generator=g, device="cuda").bfloat16()
        together = router.route(x, gate, bias, top_k, 1, 1, True, invariant=True)
        for some in (slice(0, 1), slice(7, 15), slice(60, 260), slice(100, 1300)):
            alone = router.route(x[some], gate, bias, top_k, 1, 1, True, invariant=True)
            for result, expected in zip(alone, together, strict=True):
                assert torch.equal(result, expected[some])


@pytest.mark.usefixtures("clusters")
def test_both_at_once_with_ties_and_without_numbers() -> None:
    """Columns of the identity make the logits."""
    g = torch.Generator("cuda").manual_seed(SEED)
    gate = torch.eye(128, 256, device="cuda").bfloat16()
    x = torch.randint(-1, 2, (300, 256), generator=g, device="cuda").bfloat16()
    bias = torch.zeros(128, device="cuda")
    ids, _, logits = router.route(x, gate, bias, 6, 1, 1, True)
    assert torch.equal(logits, x[:, :128].float())
    assert torch.equal(ids.long(), logits.sort(dim=1, descending=True, stable=True).indices[:, :6])
    x[0, 4], x[1], x[2, :200] = torch.nan, torch.nan, torch.inf
    ids, _, _ = router.route(x, gate, bias, 6, 1, 1, True)
    assert ids.min() >= 0
    assert ids.max() < 128
    assert all(len(row.unique()) == 6 for row in ids)


NORM_SIZES = [(128, 2688, 6, 1, 1), (512, 4096, 22, 1, 1), (24, 80, 3, 3, 2), (5, 1000, 5, 1, 1), (64, 136, 4, 8, 3)]
NORM_SIZES += [(128, 2056, 6, 1, 1), (100, 256, 8, 1, 1)]


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize(("num_experts", "hidden", "top_k", "groups", "taken"), NORM_SIZES)
def test_with_the_norm_every_bit_is_that_of_two_launches(
    num_experts: int, hidden: int, top_k: int, groups: int, taken: int, has_residual: bool
) -> None:
    g = torch.Generator("cuda").manual_seed(SEED)
    gate = (torch.randn(num_experts, hidden, generator=g, device="cuda") * hidden**-0.5).bfloat16()
    bias = torch.randn(num_experts, generator=g, device="cuda") * 0.1
    weight = (1 + 0.3 * torch.randn(hidden, generator=g, device="cuda")).bfloat16()
    taken_counts = []
    for num_tokens in router.NORM_TOKENS:
        for scale in (1e-3, 1.0, 30.0):
            rows = (torch.randn(2, num_tokens, hidden + 16, generator=g, device="cuda") * scale).bfloat16()
            x, other = rows[:, :, 16:]
            residual = other if has_residual else None
            if not router.takes_norm(x, residual, weight, num_experts, top_k):
                continue
            taken_counts.append(num_tokens)
            y, total = rms_norm(x, residual, weight, 1e-5)
            expected = (*router.route(y, gate, bias, top_k, groups, taken, True), y, total)
            with poisoned_allocations():
                norm = router.Norm(residual, weight, 1e-5)
                result = router.fused_with_norm(x, norm, gate, bias, top_k, groups, taken, True)
            assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    assert 1 in taken_counts
    assert hidden != 2688 or 4 in taken_counts


@pytest.mark.usefixtures("clusters")
def test_with_the_norm_one_launch_after_another() -> None:
    """Chained, so that each starts while the one before, which writes what it reads, may run."""
    g = torch.Generator("cuda").manual_seed(SEED)
    gates = (torch.randn(16, 128, 2688, generator=g, device="cuda") * 2688**-0.5).bfloat16()
    weights = (1 + 0.3 * torch.randn(16, 2688, generator=g, device="cuda")).bfloat16()
    bias = torch.randn(128, generator=g, device="cuda") * 0.1
    x = torch.randn(2, 2688, generator=g, device="cuda").bfloat16()

    def chain(is_joined: bool) -> list[torch.Tensor]:
        rows: tuple[torch.Tensor, torch.Tensor | None] = (x, None)
        outputs = []
        for gate, weight in zip(gates, weights, strict=True):
            if is_joined:
                result = router.fused_with_norm(rows[0], router.Norm(rows[1], weight, 1e-5), gate, bias, 6, 1, 1, True)
            else:
                y, total = rms_norm(*rows, weight, 1e-5)
                result = (*router.route(y, gate, bias, 6, 1, 1, True), y, total)
            rows = result[3:]
            outputs += result
        return outputs

    expected = chain(False)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(chain(True), expected, strict=True))
