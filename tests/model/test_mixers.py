"""The four mixers on their own: wiring, scales, state between steps, and what taps see."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hemiola.formats.quant import fp8
from hemiola.formats.weight import ExpertBank, Scheme, Weight
from hemiola.model.batch import BatchRow, ForwardBatch
from hemiola.model.linear import Linear
from hemiola.model.mixers.attention import AttentionMixer
from hemiola.model.mixers.mamba2 import Mamba2Mixer, Mamba2Parameters
from hemiola.model.mixers.mlp import MLPMixer
from hemiola.model.mixers.moe import MoEMixer, Router
from hemiola.model.specs import KVSpec, KVTensors, StateSpec, StateTensors
from hemiola.ops import KeptForms, Ops
from tests.support.numerics import INF, assert_close, bf16, generator, randn, relative_error, uniform
from tests.support.ssd import SSDInputs, recurrence
from tests.support.weights import SCHEMES, plain_weight, product, random_weight, values

HIDDEN = 32
NO_BATCH: Any = None  # MLP and MoE do not look at the batch
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=[s.value for s in SCHEMES])


@pytest.fixture
def ops() -> Ops:
    return Ops("reference", KeptForms(1 << 30))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


class Recorder:
    """A tap that keeps what it sees."""

    def __init__(self) -> None:
        self.seen: dict[str, Tensor] = {}

    def __call__(self, name: str, tensor: Tensor, /) -> None:
        self.seen[name] = tensor.clone()


# MLP


@every_scheme
def test_mlp(ops: Ops, scheme: Scheme) -> None:
    g = generator(0)
    up, down = random_weight(g, "up_proj", scheme, 48, HIDDEN), random_weight(g, "down_proj", scheme, HIDDEN, 48)
    x, tap = randn(g, 9, HIDDEN), Recorder()
    out = MLPMixer(Linear(up, torch.float32, ops), Linear(down, torch.float32, ops))(x, NO_BATCH, None, tap)
    hidden = product(x.double(), up).clamp(min=0) ** 2
    assert_close(out, product(hidden, down), 2e-2 if scheme is Scheme.FP8 else 2e-6)
    assert set(tap.seen) == {"up_proj.input", "down_proj.input"}
    assert torch.equal(tap.seen["up_proj.input"], x)
    seen = tap.seen["down_proj.input"]
    if scheme is Scheme.FP8:  # the codes that the product takes
        assert down.input_scale is not None
        assert torch.equal(seen, fp8.quantize(hidden.float(), down.input_scale))
    else:
        assert_close(seen, hidden, 2e-6)
    op = {Scheme.PLAIN: "linear", Scheme.FP8: "linear_fp8", Scheme.NVFP4: "linear_nvfp4"}[scheme]
    assert {path.op: count for path, count in ops.snapshot().items()} == {op: 2}


# Mixture of experts


@dataclasses.dataclass
class Experts:
    """A MoE layer's parameters and its output written out."""

    gate: Weight
    bias: Tensor
    up: list[Weight]
    down: list[Weight]
    shared: tuple[Weight, Weight]
    latent: tuple[Weight, Weight] | None
    top_k: int
    factor: float

    @classmethod
    def random(
        cls, g: torch.Generator, scheme: Scheme, *, num_experts: int = 8, top_k: int = 2, factor: float = 2.5,
        latent: int | None = None,
    ) -> Experts:  # fmt: skip
        width = latent or HIDDEN
        return cls(
            plain_weight("gate", randn(g, num_experts, HIDDEN) * 0.4),
            randn(g, num_experts) * 0.2,
            [random_weight(g, f"experts.{e}.up_proj", scheme, 16, width) for e in range(num_experts)],
            [random_weight(g, f"experts.{e}.down_proj", scheme, width, 16) for e in range(num_experts)],
            (random_weight(g, "shared.up", scheme, 48, HIDDEN), random_weight(g, "shared.down", scheme, HIDDEN, 48)),
            (random_weight(g, "fc1", scheme, latent, HIDDEN), random_weight(g, "fc2", scheme, HIDDEN, latent))
            if latent
            else None,
            top_k,
            factor,
        )

    def mixer(self, ops: Ops, *, shared: bool = True, dtype: torch.dtype = torch.float32) -> MoEMixer:
        router = Router(self.gate, torch.float32, self.bias, self.top_k, 1, 1, True)
        up, down = (Linear(weight, dtype, ops) for weight in self.shared)
        shared_mlp = MLPMixer(up, down) if shared else None
        latent = (Linear(self.latent[0], dtype, ops), Linear(self.latent[1], dtype, ops)) if self.latent else None
        banks = ExpertBank("experts.up_proj", tuple(self.up)), ExpertBank("experts.down_proj", tuple(self.down))
        return MoEMixer(router, *banks, self.factor, shared_mlp, latent, ops)

    def routed(self, x: Tensor) -> Tensor:
        """The unscaled sum over experts of each token, float64, before fc2."""
        x = x.double()
        scores = torch.sigmoid(x @ self.gate.data.double().T)
        inputs = product(x, self.latent[0]) if self.latent else x
        rows = []
        for token in range(x.shape[0]):
            ids = sorted(range(len(self.up)), key=lambda e: -float(scores[token, e] + self.bias[e]))[: self.top_k]
            total = scores[token, ids].sum()
            hidden = [product(inputs[token : token + 1], self.up[e]).clamp(min=0) ** 2 for e in ids]
            rows.append(
                sum(product(h, self.down[e])[0] * scores[token, e] / total for h, e in zip(hidden, ids, strict=True))
            )
        return torch.stack(rows)  # type: ignore[arg-type]

    def output(self, x: Tensor) -> Tensor:
        routed = self.routed(x) * self.factor
        hidden = product(x.double(), self.shared[0]).clamp(min=0) ** 2
        return (product(routed, self.latent[1]) if self.latent else routed) + product(hidden, self.shared[1])


@every_scheme
@pytest.mark.parametrize("latent", [None, 16])
def test_moe(ops: Ops, scheme: Scheme, latent: int | None) -> None:
    g = generator(1)
    experts, x = Experts.random(g, scheme, latent=latent), randn(g, 20, HIDDEN)
    out = experts.mixer(ops)(x, NO_BATCH, None, None)
    assert_close(out, experts.output(x), 3e-2 if scheme is Scheme.FP8 else 3e-6)


@pytest.mark.parametrize("latent", [None, 16])
def test_22_experts_and_the_factor_on_the_routed_part_only(ops: Ops, latent: int | None) -> None:
    """B7: 32 experts, 22 per token, factor 5: doubling the factor adds the routed part once more, and nothing else."""
    g = generator(2)
    experts = Experts.random(g, Scheme.PLAIN, num_experts=32, top_k=22, factor=5.0, latent=latent)
    x = randn(g, 20, HIDDEN)
    once = experts.mixer(ops)(x, NO_BATCH, None, None)
    assert_close(once, experts.output(x), 3e-6)
    twice = dataclasses.replace(experts, factor=10.0).mixer(ops)(x, NO_BATCH, None, None)
    routed = experts.mixer(ops, shared=False)(x, NO_BATCH, None, None)
    assert_close(twice - once, routed, 1e-6)
    up, down = (Linear(weight, torch.float32, ops) for weight in experts.shared)
    shared = MLPMixer(up, down).feed(x, None)
    assert_close(once - routed, shared, 2e-6)
    assert relative_error(routed, experts.mixer(ops)(x, NO_BATCH, None, None)) > 0.05


def test_the_factor_multiplies_the_rounded_routed_output_before_fc2(ops: Ops) -> None:
    """bf16: a factor of 2.5 is applied to the rounded sum, in bf16, and fc2 sees the product."""
    g = generator(3)
    experts, tap = Experts.random(g, Scheme.PLAIN, latent=16), Recorder()
    x = randn(g, 40, HIDDEN, dtype=torch.bfloat16)
    mixer = experts.mixer(ops, dtype=x.dtype)
    out = mixer(x, NO_BATCH, None, tap)
    one = dataclasses.replace(experts, factor=1.0).mixer(ops, dtype=x.dtype)
    plain = Recorder()
    one(x, NO_BATCH, None, plain)
    scaled = (plain.seen["fc2.input"].double() * 2.5).float().bfloat16()
    assert torch.equal(tap.seen["fc2.input"], scaled)
    routed = ops.linear(scaled, mixer.latent[1].weight if mixer.latent else NO_BATCH, x.dtype)
    assert mixer.shared is not None
    shared = mixer.shared.feed(x, None)
    assert torch.equal(out, (shared.double() + routed.double()).float().bfloat16())


@every_scheme
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_router_bias_near_64(ops: Ops, scheme: Scheme, dtype: torch.dtype) -> None:
    """B6: whatever the experts' scheme and the mode, the ids are those of a float32 router."""
    g = generator(4)
    experts = Experts.random(g, scheme)
    experts = dataclasses.replace(
        experts,
        gate=plain_weight("gate", randn(g, 8, HIDDEN) * 0.01),
        bias=64 + torch.randperm(8, generator=g).float() / 64,
    )
    x = randn(g, 1000, HIDDEN, dtype=dtype)
    routings: list[tuple[Tensor, Tensor, Tensor]] = []
    route = ops.moe_route

    def spy(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        routings.append(route(*args))
        return routings[-1]

    ops.moe_route = spy  # type: ignore[attr-defined]
    experts.mixer(ops, dtype=dtype)(x, NO_BATCH, None, None)
    ((ids, weights, _),) = routings
    scores = torch.sigmoid(x.float() @ experts.gate.data.T)
    expected = (scores + experts.bias).sort(dim=1, descending=True, stable=True).indices[:, :2]
    assert torch.equal(ids, expected)
    chosen = scores.gather(1, ids)
    assert_close(weights, chosen / chosen.sum(1, keepdim=True), 1e-6)
    in_bf16 = (scores.bfloat16() + experts.bias.bfloat16()).sort(dim=1, descending=True, stable=True).indices[:, :2]
    assert (in_bf16 != expected).any(1).float().mean() > 0.5


def test_a_rows_bits_do_not_depend_on_its_neighbours(ops: Ops) -> None:
    """B27: equal shapes, other contents in the other rows."""
    g = generator(5)
    experts = Experts.random(g, Scheme.NVFP4, latent=16)
    x = randn(g, 6, HIDDEN)
    first = experts.mixer(ops)(x, NO_BATCH, None, None)[0]
    for _ in range(10):
        others = randn(g, 6, HIDDEN)
        others[0] = x[0]
        assert torch.equal(experts.mixer(ops)(others, NO_BATCH, None, None)[0], first)


# Mamba-2

HEADS, HEAD_DIM, STATE_SIZE, CHUNK = 8, 4, 6, 16
INNER = HEADS * HEAD_DIM


@dataclasses.dataclass
class Mamba:
    """A mamba2 layer's parameters and its output written out."""

    in_proj: Weight
    out_proj: Weight
    parameters: Mamba2Parameters
    groups: int

    @classmethod
    def random(cls, g: torch.Generator, groups: int) -> Mamba:
        channels = INNER + 2 * groups * STATE_SIZE
        return cls(
            plain_weight("in_proj", randn(g, INNER + channels + HEADS, HIDDEN) / HIDDEN**0.5),
            plain_weight("out_proj", randn(g, HIDDEN, INNER) / INNER**0.5),
            Mamba2Parameters(
                conv_weight=randn(g, channels, 4),
                conv_bias=randn(g, channels) * 0.1,
                A=-torch.exp(torch.linspace(-4, 1, HEADS)),
                D=uniform(g, 0.5, 1.5, HEADS),
                dt_bias=uniform(g, -3.0, 0.5, HEADS),
                norm_weight=uniform(g, 0.5, 1.5, INNER),
            ),
            groups,
        )

    @property
    def spec(self) -> StateSpec:
        return StateSpec(0, INNER + 2 * self.groups * STATE_SIZE, 3, HEADS, HEAD_DIM, STATE_SIZE)

    def mixer(self, ops: Ops, dt_limit: tuple[float, float] = (0.0, INF)) -> Mamba2Mixer:
        in_proj, out_proj = Linear(self.in_proj, torch.float32, ops), Linear(self.out_proj, torch.float32, ops)
        return Mamba2Mixer(self.spec, in_proj, out_proj, self.parameters, self.groups, CHUNK, dt_limit, 1e-5, ops)

    def cache(self, slots: int = 5) -> StateTensors:
        s, nan = self.spec, float("nan")
        conv = torch.full((slots, s.conv_dim, 3), nan)
        return StateTensors(conv, torch.full((slots, HEADS, HEAD_DIM, STATE_SIZE), nan))

    def output(
        self, x: Tensor, *, norm_groups: int | None = None, dt_limit: tuple[float, float] = (0.0, INF)
    ) -> tuple[Tensor, Tensor]:
        """A whole prompt, token by token, float64; returns the output and the last SSM state."""
        p, length = self.parameters, x.shape[0]
        u = x.double() @ self.in_proj.data.double().T
        z, channels, dt = u[:, :INNER], u[:, INNER:-HEADS], u[:, -HEADS:]
        padded = torch.cat([torch.zeros(3, channels.shape[1], dtype=torch.float64), channels])
        assert p.conv_bias is not None
        convolved = silu(sum(padded[i : i + length] * p.conv_weight[:, i].double() for i in range(4)) + p.conv_bias)
        bc = self.groups * STATE_SIZE
        inputs = SSDInputs(
            convolved[:, :INNER].view(length, HEADS, HEAD_DIM),
            dt,
            p.A,
            convolved[:, INNER : INNER + bc].view(length, self.groups, STATE_SIZE),
            convolved[:, INNER + bc :].view(length, self.groups, STATE_SIZE),
            p.D,
            p.dt_bias,
        )
        y, state = recurrence(inputs, None, dt_limit)
        gated = (y.flatten(1) * silu(z)).view(length, norm_groups or self.groups, -1)
        normed = (gated / torch.sqrt(gated.square().mean(-1, keepdim=True) + 1e-5)).flatten(1) * p.norm_weight
        return normed @ self.out_proj.data.double().T, state


def feed(mixer: Mamba2Mixer, cache: StateTensors, x: Tensor, cuts: Sequence[int], slot: int = 2) -> Tensor:
    """One request, step by step."""
    parts = []
    for low, high in pairwise([0, *cuts, x.shape[0]]):
        batch = ForwardBatch.build([BatchRow([0] * (high - low), low, [], slot)], 16)
        parts.append(mixer(x[low:high], batch, cache, None))
    return torch.cat(parts)


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_mamba2_and_its_group_norm(ops: Ops, groups: int) -> None:
    """B2 and B5: more than three chunks; a full-width mean must be visible for 2 and 8 groups."""
    g = generator(groups)
    mamba, x = Mamba.random(g, groups), randn(g, 53, HIDDEN)
    cache = mamba.cache()
    out = feed(mamba.mixer(ops), cache, x, [])
    expected, state = mamba.output(x)
    assert_close(out, expected, 5e-6)
    assert_close(cache.ssm[2], state, 5e-6)
    assert (relative_error(out, mamba.output(x, norm_groups=1)[0]) > 1e-2) == (groups > 1)
    assert all(t[[0, 1, 3, 4]].isnan().all() for t in cache)


def test_mamba2_time_step_limit(ops: Ops) -> None:
    g = generator(6)
    mamba, x = Mamba.random(g, 2), randn(g, 20, HIDDEN)
    for cuts in ([], list(range(1, 20))):  # the scan, and the one-token form
        cache = mamba.cache()
        out = feed(mamba.mixer(ops, (0.01, 0.1)), cache, x, cuts)
        assert_close(out, mamba.output(x, dt_limit=(0.01, 0.1))[0], 5e-6)
        assert relative_error(out, mamba.output(x)[0]) > 1e-2


@pytest.mark.parametrize("cuts", [[13], [1], [39], list(range(4, 40, 4)), list(range(1, 40)), [16, 32], [16, 17, 30]])
def test_mamba2_in_pieces(ops: Ops, cuts: list[int]) -> None:
    """B3: output, conv state and SSM state of 40 tokens, in any split."""
    g = generator(7)
    mamba, x = Mamba.random(g, 2), randn(g, 40, HIDDEN)
    whole_cache, cache = mamba.cache(), mamba.cache()
    whole = feed(mamba.mixer(ops), whole_cache, x, [])
    assert_close(feed(mamba.mixer(ops), cache, x, cuts), whole, 1e-5)
    assert_close(cache.ssm[2], whole_cache.ssm[2], 1e-5)
    assert_close(cache.conv[2], whole_cache.conv[2], 2e-6)


def test_mamba2_mixed_batch_with_padding(ops: Ops) -> None:
    """A decode, padded decodes, a first chunk, a later chunk and a prompt of one token: each as alone."""
    g = generator(8)
    mamba = Mamba.random(g, 2)
    mixer, cache = mamba.mixer(ops), mamba.cache()
    prompts = [randn(g, 9, HIDDEN), randn(g, 21, HIDDEN), randn(g, 30, HIDDEN), randn(g, 1, HIDDEN)]
    feed(mixer, cache, prompts[0][:8], [], slot=3)
    feed(mixer, cache, prompts[2][:7], [], slot=0)
    rows = [
        BatchRow([0], 8, [], 3),
        BatchRow([0] * 21, 0, [], 1),
        BatchRow([0] * 23, 7, [], 0),
        BatchRow([0], 0, [], 4),
    ]
    batch = ForwardBatch.build(rows, 16, pad_decodes_to=4)
    junk = torch.full((3, HIDDEN), 7.0)
    out = mixer(torch.cat([prompts[0][8:], junk, prompts[1], prompts[2][7:], prompts[3]]), batch, cache, None)
    pieces = [out[:1], out[4:25], out[25:48], out[48:]]
    for prompt, piece, slot in zip(prompts, pieces, (3, 1, 0, 4), strict=True):
        expected, state = mamba.output(prompt)
        assert_close(piece, expected[-piece.shape[0] :], 1e-5)
        assert_close(cache.ssm[slot], state, 1e-5)
    assert all(t[2].isnan().all() for t in cache), "no row owns slot 2"


# Attention


def attention(g: torch.Generator, scheme: Scheme, ops: Ops, **changes: Any) -> tuple[AttentionMixer, list[Weight]]:
    """4 heads on 2 KV heads of 8; `changes` maps a projection's letter to fields of its weight."""
    weights = []
    for letter, out_size, in_size in (("q", 32, HIDDEN), ("k", 16, HIDDEN), ("v", 16, HIDDEN), ("o", HIDDEN, 32)):
        weight = random_weight(g, f"{letter}_proj", scheme, out_size, in_size)
        weights.append(dataclasses.replace(weight, **changes.get(letter, {})))
    projections = [Linear(weight, torch.float32, ops) for weight in weights]
    return AttentionMixer("mixer", KVSpec(0, 2, 8), *projections, 8**-0.5, (0.5, 2.0), ops), weights


def kv_cache(dtype: torch.dtype = torch.float32) -> KVTensors:
    nan = torch.full((12, 4, 2, 8), float("nan"))
    return KVTensors(nan.to(dtype), nan.clone().to(dtype))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(n, Hq, 8), (n, Hkv, 8) float64, whole prompt."""
    keys, others = (t.repeat_interleave(2, 1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, keys) * 8**-0.5
    past = torch.ones(q.shape[0], q.shape[0]).tril().bool()
    return torch.einsum("hij,jhd->ihd", torch.softmax(scores.masked_fill(~past, -INF), -1), others)


@every_scheme
def test_attention_keeps_each_projections_scales(ops: Ops, scheme: Scheme) -> None:
    """B16: q, k and v with scales that differ eightfold are not fused under one."""
    g = generator(9)
    scales = {} if scheme is Scheme.PLAIN else {"q": {"scale": 0.004}, "k": {"scale": 0.008}, "v": {"scale": 0.032}}
    mixer, (q, k, v, o) = attention(g, scheme, ops, **scales)
    x, tap = randn(g, 11, HIDDEN), Recorder()
    batch = ForwardBatch.build([BatchRow([0] * 11, 0, [7, 2, 9], 0)], 4)
    out = mixer(x, batch, kv_cache(), tap)
    parts = [product(x.double(), w).unflatten(1, (-1, 8)) for w in (q, k, v)]
    assert_close(tap.seen["mixer.k"], parts[1], 1e-6)
    assert_close(tap.seen["mixer.v"], parts[2], 1e-6)
    heads = attend(*parts).flatten(1)
    assert_close(tap.seen["o_proj.input"], heads, 2e-6)
    # An o_proj of FP8 quantises what it is given: the last bit of that may move a code.
    assert_close(out, product(heads, o), 3e-2 if scheme is Scheme.FP8 else 2e-6)
    assert torch.equal(tap.seen["q_proj.input"], x)


def test_attention_mixed_batch_in_pieces_with_padding(ops: Ops) -> None:
    g = generator(10)
    mixer, weights = attention(g, Scheme.PLAIN, ops)
    cache = kv_cache()
    prompts = [randn(g, 6, HIDDEN), randn(g, 9, HIDDEN), randn(g, 1, HIDDEN)]
    blocks = [[5, 1], [8, 0, 3], [11]]
    for prompt, row_blocks, count in ((prompts[0], blocks[0], 5), (prompts[1], blocks[1], 3)):
        mixer(prompt[:count], ForwardBatch.build([BatchRow([0] * count, 0, row_blocks, 0)], 4), cache, None)
    rows = [BatchRow([0], 5, blocks[0], 0), BatchRow([0] * 6, 3, blocks[1], 0), BatchRow([0], 0, blocks[2], 0)]
    batch = ForwardBatch.build(rows, 4, pad_decodes_to=3)
    junk = torch.full((2, HIDDEN), 7.0)
    out = mixer(torch.cat([prompts[0][5:], junk, prompts[1][3:], prompts[2]]), batch, cache, None)
    for prompt, piece in zip(prompts, (out[:1], out[3:9], out[9:]), strict=True):
        q, k, v = (product(prompt.double(), w).unflatten(1, (-1, 8)) for w in weights[:3])
        expected = product(attend(q, k, v).flatten(1), weights[3])
        assert_close(piece, expected[-piece.shape[0] :], 2e-6)
    used = {b for row_blocks in blocks for b in row_blocks}
    assert all(cache.k[b].isnan().all() and cache.v[b].isnan().all() for b in range(12) if b not in used)


def test_attention_with_an_fp8_cache(ops: Ops) -> None:
    """k_scale 0.5 and v_scale 2 each on its own tensor, in the write and in the read."""
    g = generator(11)
    mixer, weights = attention(g, Scheme.PLAIN, ops)
    x = randn(g, 8, HIDDEN)
    batch = ForwardBatch.build([BatchRow([0] * 8, 0, [4, 2], 0)], 4)
    cache = kv_cache(torch.float8_e4m3fn)
    out = mixer(x, batch, cache, None)
    q, k, v = (product(x.double(), w).unflatten(1, (-1, 8)) for w in weights[:3])
    stored = [cache[i][[4, 2]].flatten(0, 1).double() * scale for i, scale in enumerate((0.5, 2.0))]
    assert_close(stored[0], k, 0.04)
    assert_close(stored[1], v, 0.04)
    assert_close(out, attend(q, *stored).flatten(1) @ values(weights[3]).T, 2e-6)
    assert relative_error(out, attend(q, k, v).flatten(1) @ values(weights[3]).T) > 1e-3
    assert torch.equal(bf16(stored[0]), stored[0])
