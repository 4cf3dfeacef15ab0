"""A Nemotron-H for training: the mathematics of the public models, differentiable, parameters under their public names.

Float32 parameters; matrix products follow the caller's autocast; decays, states, softmax and the router stay in
float32. Routed experts are all computed and masked, which is exact and cheap at this size. Knows nothing of caches.
Letters: B batch, T tokens, H SSM heads, P head_dim, G groups, N state, Q chunk, K conv width, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.rounding import Rounding


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Geometry of the shipped model. Names as in the public ``config.json`` (see ``training.export``)."""

    pattern: str = "MEM*EMEM*E"
    vocab_size: int = 4096
    hidden_size: int = 256
    mamba_num_heads: int = 16
    mamba_head_dim: int = 32
    n_groups: int = 2
    ssm_state_size: int = 64
    conv_kernel: int = 4
    chunk_size: int = 64
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    n_routed_experts: int = 16
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 96
    shared_intermediate_size: int = 128
    routed_scaling_factor: float = 2.5
    norm_eps: float = 1e-5
    dropout: float = 0.0  # of the embedding and of each mixer's output, in training mode only

    @property
    def mamba_inner(self) -> int:
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_dim(self) -> int:
        return self.mamba_inner + 2 * self.n_groups * self.ssm_state_size


def ssd_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """Chunked form of S_t = exp(A dt_t) S_{t-1} + dt_t x_t B_t^T, y_t = S_t C_t, from a zero state.

    Args:
        x: (B, T, H, P). dt: (B, T, H) float, after softplus. a: (H,) float, negative. b, c: (B, T, G, N).
        chunk: tokens per chunk; T need not be a multiple of it.

    Returns:
        (B, T, H, P) in the dtype of the products. Decays and states are at least float32.
    Source: Dao and Gu, "Transformers are SSMs" (2024), section 6.
    """
    batch, tokens, heads, head_dim = x.shape
    groups, state = b.shape[2:]
    pad = -tokens % chunk  # padding has dt = 0: it neither decays nor feeds the state
    x, b, c = (F.pad(t, (0, 0, 0, 0, 0, pad)) for t in (x, b, c))
    dt = F.pad(dt, (0, 0, 0, pad))
    num = (tokens + pad) // chunk
    per = heads // groups
    x = x.view(batch, num, chunk, groups, per, head_dim)
    b, c = (t.view(batch, num, chunk, groups, state) for t in (b, c))
    dt = dt.view(batch, num, chunk, groups, per).permute(0, 1, 3, 4, 2)  # (B, num, G, per, Q)
    total = torch.cumsum(dt * a.view(groups, per, 1), dim=-1)  # log-decay from the chunk's start, inclusive
    xdt = x.permute(0, 1, 3, 4, 2, 5) * dt.unsqueeze(-1).to(x.dtype)  # (B, num, G, per, Q, P)

    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    gap = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~causal, -torch.inf)  # (..., Q query, Q key)
    scores = torch.matmul(c.transpose(2, 3), b.permute(0, 1, 3, 4, 2))  # (B, num, G, Q, Q)
    y = torch.matmul((scores.unsqueeze(3) * gap.exp()).to(x.dtype), xdt)

    left = (total[..., -1:] - total).exp().to(x.dtype)  # decay from each token to the chunk's end
    fed = torch.matmul((xdt * left.unsqueeze(-1)).transpose(-1, -2), b.transpose(2, 3).unsqueeze(3))  # (..., P, N)
    with torch.autocast(x.device.type, enabled=False):
        ends = F.pad(torch.cumsum(total[..., -1], dim=1), (0, 0, 0, 0, 1, 0))[:, :-1]  # log-decay up to each chunk
        ends = ends.permute(0, 2, 3, 1)  # (B, G, per, num)
        after = torch.cumsum(total[..., -1], dim=1).permute(0, 2, 3, 1)
        earlier = torch.ones(num, num, dtype=torch.bool, device=x.device).tril(-1)
        carry = (ends.unsqueeze(-1) - after.unsqueeze(-2)).masked_fill(~earlier, -torch.inf).exp()  # (..., to, from)
        flat = fed.to(carry.dtype).permute(0, 2, 3, 1, 4, 5).flatten(-2)  # (B, G, per, num, P*N)
        before = torch.matmul(carry, flat).view(batch, groups, per, num, head_dim, state)
    before = before.permute(0, 3, 1, 2, 5, 4).to(x.dtype)  # (B, num, G, per, N, P)
    y = y + torch.matmul(c.transpose(2, 3).unsqueeze(3), before) * total.exp().unsqueeze(-1)
    return y.permute(0, 1, 4, 2, 3, 5).reshape(batch, num * chunk, heads, head_dim)[:, :tokens]


class RMSNorm(nn.Module):
    """RMS over the last dimension in float32, over each of ``groups`` equal parts of it."""

    def __init__(self, size: int, eps: float, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.groups = eps, groups

    def forward(self, x: Tensor) -> Tensor:
        parts = x.to(self.weight.dtype).unflatten(-1, (self.groups, -1))
        parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + self.eps)
        return parts.flatten(-2) * self.weight


class RoundedLinear(nn.Module):
    """x W^T; ``rounding`` says which storage format the weight is trained towards, if not bf16."""

    def __init__(self, inputs: int, outputs: int, rounding: Rounding | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs).normal_(std=0.5 / math.sqrt(inputs)))
        self.rounding = rounding

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight if self.rounding is None else self.rounding(self.weight))


class Mamba2(nn.Module):
    """Mamba-2 mixer; ``in_proj`` rows are z, x, B, C, dt in this order; the gate comes before the group norm."""

    def __init__(self, config: ModelConfig, rounding: Rounding) -> None:
        super().__init__()
        self.config = config
        heads, inner = config.mamba_num_heads, config.mamba_inner
        self.in_proj = RoundedLinear(config.hidden_size, inner + config.conv_dim + heads, rounding)
        self.conv1d = nn.Conv1d(config.conv_dim, config.conv_dim, config.conv_kernel, groups=config.conv_dim)
        step = torch.exp(torch.rand(heads) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus(dt_bias) = step
        self.A_log = nn.Parameter(torch.log(torch.rand(heads) * 15 + 1))
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = RMSNorm(inner, config.norm_eps, config.n_groups)
        self.out_proj = RoundedLinear(inner, config.hidden_size, rounding)

    def forward(self, n: Tensor) -> Tensor:
        config = self.config
        inner, bc = config.mamba_inner, config.n_groups * config.ssm_state_size
        z, xbc, dt = self.in_proj(n).split([inner, config.conv_dim, config.mamba_num_heads], dim=-1)
        # The convolution is written as shifted products: a depthwise kernel of four taps is all memory traffic.
        padded = F.pad(xbc, (0, 0, config.conv_kernel - 1, 0))
        taps = self.conv1d.weight[:, 0].to(xbc.dtype)
        shifted = (padded[:, k : k + xbc.shape[1]] * taps[:, k] for k in range(config.conv_kernel))
        xbc = F.silu(sum(shifted, self.conv1d.bias.to(xbc.dtype)))
        x, b, c = xbc.split([inner, bc, bc], dim=-1)
        x = x.unflatten(-1, (config.mamba_num_heads, config.mamba_head_dim))
        b, c = (t.unflatten(-1, (config.n_groups, config.ssm_state_size)) for t in (b, c))
        dt = F.softplus(dt.to(self.dt_bias.dtype) + self.dt_bias)
        y = ssd_scan(x, dt, -self.A_log.exp(), b, c, config.chunk_size) + self.D.unsqueeze(-1) * x
        gated = y.flatten(-2).to(self.D.dtype) * F.silu(z.to(self.D.dtype))
        return self.out_proj(self.norm(gated))


class Attention(nn.Module):
    """Causal grouped-query attention without positional encoding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = RoundedLinear(config.hidden_size, queries)
        self.k_proj = RoundedLinear(config.hidden_size, keys)
        self.v_proj = RoundedLinear(config.hidden_size, keys)
        self.o_proj = RoundedLinear(queries, config.hidden_size)

    def forward(self, n: Tensor) -> Tensor:
        projected = (self.q_proj(n), self.k_proj(n), self.v_proj(n))
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in projected)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


class Gate(nn.Module):
    """Sigmoid router in float32; the bias takes part in the selection only and is not trained by gradients."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top = config.num_experts_per_tok
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size).normal_(std=0.02))
        self.e_score_correction_bias: Tensor
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))

    def forward(self, n: Tensor) -> tuple[Tensor, Tensor]:
        """(mixing weights (B, T, E), zero for the unselected; how many tokens chose each expert (E,))."""
        with torch.autocast(n.device.type, enabled=False):
            scores = torch.sigmoid(F.linear(n.to(self.weight.dtype), self.weight))
            chosen = (scores + self.e_score_correction_bias).topk(self.top, dim=-1).indices
            mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
            kept = scores * mask
            return kept / (kept.sum(-1, keepdim=True) + 1e-20), mask.sum(dim=(0, 1))


class Experts(nn.Module):
    """Two matrices, non-gated, squared relu; ``count`` of them side by side."""

    def __init__(self, count: int, hidden: int, inner: int, rounding: Rounding) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.empty(count, inner, hidden).normal_(std=0.5 / math.sqrt(hidden)))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner).normal_(std=0.5 / math.sqrt(inner)))
        self.rounding = rounding

    def forward(self, n: Tensor, weights: Tensor | None = None) -> Tensor:
        """n (B, T, hidden), weights (B, T, count) or None for one -> the weighted sum (B, T, hidden)."""
        up, down = self.rounding(self.up_proj), self.rounding(self.down_proj)
        act = F.relu(F.linear(n, up.flatten(0, 1))).square()
        if weights is not None:
            act = (act.unflatten(-1, (weights.shape[-1], -1)) * weights.unsqueeze(-1).to(act.dtype)).flatten(-2)
        return F.linear(act, down.transpose(0, 1).flatten(1))


class MoE(nn.Module):
    """Top-k of the routed experts, times the scale on the output, plus one shared expert."""

    def __init__(self, config: ModelConfig, rounding: Rounding) -> None:
        super().__init__()
        self.scale = config.routed_scaling_factor
        self.gate = Gate(config)
        self.experts = Experts(config.n_routed_experts, config.hidden_size, config.moe_intermediate_size, rounding)
        self.shared_experts = Experts(1, config.hidden_size, config.shared_intermediate_size, rounding)

    def forward(self, n: Tensor) -> tuple[Tensor, Tensor]:
        weights, load = self.gate(n)
        return self.shared_experts(n) + self.scale * self.experts(n, weights), load


class Layer(nn.Module):
    """x + mixer(norm(x)); returns the expert load of an MoE layer, else None."""

    def __init__(self, kind: str, config: ModelConfig, nvfp4: Rounding, fp8: Rounding) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.mixer = Mamba2(config, fp8) if kind == "M" else MoE(config, nvfp4) if kind == "E" else Attention(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        mixed = self.mixer(self.norm(x))
        mixed, load = mixed if isinstance(mixed, tuple) else (mixed, None)
        return x + self.dropout(mixed), load


class Backbone(nn.Module):
    def __init__(self, config: ModelConfig, nvfp4: Rounding, fp8: Rounding) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embeddings.weight, std=0.5)
        self.layers = nn.ModuleList(Layer(kind, config, nvfp4, fp8) for kind in config.pattern)
        self.norm_f = RMSNorm(config.hidden_size, config.norm_eps)


class NemotronH(nn.Module):
    """The whole model; see ``set_rounding`` for training towards the shipped storage formats."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.dropout = nn.Dropout(config.dropout)
        self.nvfp4, self.fp8 = Rounding("nvfp4"), Rounding("fp8")
        self.backbone = Backbone(config, self.nvfp4, self.fp8)
        self.lm_head = RoundedLinear(config.hidden_size, config.vocab_size, self.nvfp4)
        depth = 1 / math.sqrt(len(config.pattern))
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith(("out_proj.weight", "o_proj.weight", "experts.down_proj")):
                    parameter.mul_(depth)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids (B, T) -> (logits (B, T, V), expert loads (number of E layers, E))."""
        x, loads = self.dropout(self.backbone.embeddings(ids)), []
        for layer in self.backbone.layers:
            x, load = layer(x)
            loads += [] if load is None else [load]
        return self.lm_head(self.backbone.norm_f(x)), torch.stack(loads)

    def set_rounding(self, share: float) -> None:
        """Uses weights rounded to NVFP4 and FP8 where the shipped model stores them so: 0 not at all, 1 fully."""
        self.nvfp4.share.fill_(share)
        self.fp8.share.fill_(share)

    @torch.no_grad()
    def balance(self, loads: Tensor, rate: float) -> None:
        """Moves each selection bias one step towards an even load: up for idle experts, down for busy ones.

        Source: DeepSeek-V3 technical report (2024), auxiliary-loss-free load balancing.
        """
        gates = [layer.mixer.gate for layer in self.backbone.layers if isinstance(layer.mixer, MoE)]
        for gate, load in zip(gates, loads, strict=True):
            gate.e_score_correction_bias += rate * torch.sign(load.mean() - load)
