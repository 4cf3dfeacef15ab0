"""Routed experts: brute force for every scheme, the ledger, and independence of the neighbours' routing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hemiola.formats.weight import Scheme, Weight
from hemiola.ops.kept import KeptForms
from hemiola.ops.moe_experts import moe_experts
from tests.support.numerics import assert_close, assert_ledger, bf16, generator, randn, relative_error, uniform
from tests.support.weights import SCHEMES, plain_weight, product, random_weight

NUM_EXPERTS, TOP_K, HIDDEN, INTER = 8, 2, 64, 32
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=[s.value for s in SCHEMES])


def store() -> KeptForms:
    return KeptForms(1 << 30)


def experts(
    g: torch.Generator, scheme: Scheme, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[Weight], list[Weight]]:
    up = [random_weight(g, f"experts.{e}.up_proj", scheme, INTER, HIDDEN, dtype) for e in range(NUM_EXPERTS)]
    down = [random_weight(g, f"experts.{e}.down_proj", scheme, HIDDEN, INTER, dtype) for e in range(NUM_EXPERTS)]
    return up, down


def routing(g: torch.Generator, num_tokens: int, top_k: int = TOP_K) -> tuple[Tensor, Tensor]:
    ids = torch.stack([torch.randperm(NUM_EXPERTS, generator=g)[:top_k] for _ in range(num_tokens)])
    return ids, uniform(g, 0.1, 1.0, num_tokens, top_k)


def brute_force(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: list[Weight],
    down: list[Weight],
    *,
    rounds: bool = False,
    without: str = "",
    activation: str = "relu squared",
) -> Tensor:
    """Token by token, float64; with `rounds`, every bf16 rounding of the ledger but the one named by `without`."""

    def rounded(name: str, value: Tensor) -> Tensor:
        return bf16(value) if rounds and name != without else value

    result = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
            h = rounded("up", product(x[token : token + 1].double(), up[expert]))
            if activation == "gated silu":
                h = h / (1 + torch.exp(-h)) * h
            else:
                h = h.clamp(min=0) ** (2 if activation == "relu squared" else 1)
            out = product(rounded("relu squared", h), down[expert])
            if without == "weight after the rounding":
                out = bf16(out)
            result[token] += rounded("expert output", out[0] * weight)
    return result


@every_scheme
@pytest.mark.parametrize("num_tokens", [1, 2, 15, 17])
def test_float32_equals_float64(scheme: Scheme, num_tokens: int) -> None:
    g = generator(num_tokens)
    (up, down), x = experts(g, scheme, torch.float32), randn(g, num_tokens, HIDDEN)
    ids, weights = routing(g, num_tokens)
    # Where the hidden activation is quantised too, a last-bit difference may move it by a whole e4m3 step.
    bound = 2e-2 if scheme is Scheme.FP8 else 2e-6
    result = moe_experts(x, ids, weights, up, down, kept=store())
    expected = brute_force(x, ids, weights, up, down)
    assert_close(result, expected, bound)
    assert ((result.double() - expected).abs() > 2e-6 * expected.abs().max()).double().mean() < 0.05


@every_scheme
def test_squared_relu_without_a_gate(scheme: Scheme) -> None:
    """B14: 64 random rows; a gated SiLU, a plain ReLU or a biased weight would be far outside of the bound."""
    g = generator(14)
    (up, down), x = experts(g, scheme), randn(g, 64, HIDDEN)
    ids, weights = routing(g, 64)
    result = moe_experts(x, ids, weights, up, down, kept=store())
    assert_close(result, brute_force(x, ids, weights, up, down), 2e-2 if scheme is Scheme.FP8 else 2e-6)
    for activation in ("gated silu", "relu"):
        assert relative_error(result, brute_force(x, ids, weights, up, down, activation=activation)) > 0.1
    equal_weights = torch.full_like(weights, 0.5)
    assert relative_error(result, brute_force(x, ids, equal_weights, up, down)) > 0.1


@every_scheme
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_negative_preactivations_give_exact_zeros(scheme: Scheme, dtype: torch.dtype) -> None:
    """B14: expert 3 sees only negative pre-activations in the rows whose inputs are negative."""
    g = generator(15)
    up, down = experts(g, scheme)
    ones = {
        Scheme.PLAIN: torch.ones(INTER, HIDDEN, dtype=torch.bfloat16),
        Scheme.FP8: torch.ones(INTER, HIDDEN).to(torch.float8_e4m3fn),
        Scheme.NVFP4: torch.full((INTER, HIDDEN // 2), 0x22, dtype=torch.uint8),  # code 2 is 1.0
    }[scheme]
    old = up[3]
    up[3] = Weight(old.name, old.shape, scheme, ones, old.block_scale, old.scale, old.input_scale)
    x = randn(g, 64, HIDDEN).abs().to(dtype) + 0.01
    x[::2] *= -1
    ids = torch.full((64, 1), 3)
    out = moe_experts(x, ids, torch.ones(64, 1), up, down, kept=store())
    assert out[::2].eq(0).all()
    assert out[1::2].ne(0).any(1).all()


@pytest.mark.parametrize("scheme", [Scheme.PLAIN, Scheme.NVFP4], ids=["plain", "nvfp4"])
def test_bf16_ledger(scheme: Scheme) -> None:
    """up and its squared ReLU rounded, down times the routing weight rounded per expert, the sum rounded."""
    g = generator(16)
    (up, down), x = experts(g, scheme), randn(g, 48, HIDDEN, dtype=torch.bfloat16)
    ids, weights = routing(g, 48, 4)
    inputs = (x, ids, weights, up, down)
    wrong = {
        f"no rounding of {name}": brute_force(*inputs, rounds=True, without=name)
        for name in ("up", "relu squared", "expert output")
    }
    wrong["a rounding before the routing weight"] = brute_force(
        *inputs, rounds=True, without="weight after the rounding"
    )
    wrong["weights rounded to bf16"] = brute_force(x, ids, bf16(weights.double()), up, down, rounds=True)
    result = moe_experts(*inputs, kept=store())
    assert_ledger(result, brute_force(*inputs, rounds=True), wrong)


def test_fp8_hidden_activations_are_quantised_from_their_bf16_values() -> None:
    g = generator(17)
    (up, down), x = experts(g, Scheme.FP8), randn(g, 48, HIDDEN, dtype=torch.bfloat16)
    inputs = (x, *routing(g, 48), up, down)
    plain_down = [plain_weight(w.name, w.dense()) for w in down]
    assert_ledger(
        moe_experts(*inputs, kept=store()),
        brute_force(*inputs, rounds=True),
        {"an unquantised hidden activation": brute_force(*inputs[:3], up, plain_down, rounds=True)},
    )


def test_the_sum_over_experts_is_float32() -> None:
    """One large and many small expert outputs: a bf16 accumulator would swallow the small ones."""
    up = [plain_weight(f"up.{e}", torch.ones(1, 1, dtype=torch.bfloat16)) for e in range(NUM_EXPERTS)]
    down = [plain_weight(f"down.{e}", torch.ones(1, 1, dtype=torch.bfloat16)) for e in range(NUM_EXPERTS)]
    weights = torch.tensor([[256.0] + [0.75] * 7])
    x = torch.ones(1, 1, dtype=torch.bfloat16)
    assert moe_experts(x, torch.arange(8)[None], weights, up, down, kept=store()).tolist() == [[262.0]]  # 261.25


@every_scheme
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_does_not_depend_on_its_neighbours_routing(scheme: Scheme, dtype: torch.dtype) -> None:
    """B27: batches of one shape whose other rows differ, and so the number of rows that share an expert."""
    g, kept = generator(18), store()
    up, down = experts(g, scheme)
    for num_tokens in (2, 5, 12):
        x = randn(g, num_tokens, HIDDEN, dtype=dtype)
        ids, weights = routing(g, num_tokens)
        first = moe_experts(x, ids, weights, up, down, kept=kept)[0]
        for _ in range(12):
            others, (other_ids, other_weights) = randn(g, num_tokens, HIDDEN, dtype=dtype), routing(g, num_tokens)
            others[0], other_ids[0], other_weights[0] = x[0], ids[0], weights[0]
            assert torch.equal(moe_experts(others, other_ids, other_weights, up, down, kept=kept)[0], first)


def test_a_row_alone_equals_the_row_in_a_batch() -> None:
    g, kept = generator(19), store()
    (up, down), x = experts(g, Scheme.PLAIN), randn(g, 9, HIDDEN)
    ids, weights = routing(g, 9)
    together = moe_experts(x, ids, weights, up, down, kept=kept)
    for row in range(9):
        alone = moe_experts(x[row : row + 1], ids[row : row + 1], weights[row : row + 1], up, down, kept=kept)[0]
        assert_close(alone, together[row], 1e-6)


def test_schemes_may_differ_from_expert_to_expert() -> None:
    g = generator(20)
    per_scheme = {scheme: experts(g, scheme) for scheme in SCHEMES}
    up = [per_scheme[SCHEMES[e % 3]][0][e] for e in range(NUM_EXPERTS)]
    down = [per_scheme[SCHEMES[(e + 1) % 3]][1][e] for e in range(NUM_EXPERTS)]
    x, (ids, weights) = randn(g, 20, HIDDEN, dtype=torch.bfloat16), routing(g, 20)
    assert_ledger(
        moe_experts(x, ids, weights, up, down, kept=store()),
        brute_force(x, ids, weights, up, down, rounds=True),
        {"experts shifted by one": brute_force(x, (ids + 1) % NUM_EXPERTS, weights, up, down, rounds=True)},
    )


def test_experts_that_nobody_takes_are_not_read() -> None:
    g = generator(21)
    up, down = experts(g, Scheme.PLAIN)
    x, ids, weights = randn(g, 4, HIDDEN), torch.tensor([[0, 1]] * 4), torch.full((4, 2), 0.5)
    expected = moe_experts(x, ids, weights, up, down, kept=store())
    for e in range(2, NUM_EXPERTS):
        up[e], down[e] = (plain_weight(w.name, torch.full(w.shape, float("nan"))) for w in (up[e], down[e]))
    kept = store()
    assert torch.equal(moe_experts(x, ids, weights, up, down, kept=kept), expected)
    assert kept.kept_bytes == 4 * INTER * HIDDEN * 4


def test_the_tap_sees_each_taken_experts_own_rows() -> None:
    g = generator(22)
    (up, down), x = experts(g, Scheme.PLAIN), randn(g, 5, HIDDEN)
    ids, weights = torch.tensor([[0, 3], [3, 1], [1, 0], [3, 0], [3, 1]]), uniform(g, 0.1, 1, 5, 2)
    seen: dict[str, Tensor] = {}

    def tap(name: str, tensor: Tensor, /) -> None:
        assert name not in seen
        seen[name] = tensor.clone()

    tapped = moe_experts(x, ids, weights, up, down, tap=tap, kept=store())
    assert torch.equal(tapped, moe_experts(x, ids, weights, up, down, kept=store()))
    assert set(seen) == {f"experts.{e}.{p}_proj.input" for e in (0, 1, 3) for p in ("up", "down")}
    assert torch.equal(seen["experts.3.up_proj.input"], x[[0, 1, 3, 4]])
    hidden = (x[[1, 2, 4]].double() @ up[1].data.double().T).clamp(min=0) ** 2
    assert_close(seen["experts.1.down_proj.input"], hidden, 2e-6)
