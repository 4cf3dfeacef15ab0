"""Nemotron-H one token at a time in float64, from a checkpoint folder's own files: what every batch must equal.

Written from the formulas, apart from the package: it shares nothing with it, has no chunks, no batches and no caches
besides a request's own lists, and reads plain (float32 or bfloat16) weights only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

_LETTERS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}
_E4M3_MAX = 448.0


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _to_e4m3_and_back(x: Tensor, scale: float) -> Tensor:
    return (x.float() / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).double() * scale


class Weights:
    """A folder's config.json and its tensors, widened to float64."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            self.tensors |= {name: tensor.double() for name, tensor in load_file(file).items()}
        words = self.config.get("layers_block_type")
        self.pattern = "".join(_LETTERS[w] for w in words) if words else self.config["hybrid_override_pattern"]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


class Recurrence:
    """One request. `read` consumes tokens; everything it has consumed stays in `conv`, `ssm`, `keys` and `values`.

    kv_scales: (k_scale, v_scale) by attention layer of an FP8 KV cache; None keeps keys and values as they are.
    norm_groups: how many groups the gated norm averages over, in place of the config's; a wrong one is a wrong model.
    dt_limit: the clamp of the time step, in place of the config's.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        kv_scales: Mapping[int, tuple[float, float]] | None = None,
        norm_groups: int | None = None,
        dt_limit: tuple[float, float] | None = None,
    ) -> None:
        c = weights.config
        self.weights, self.kv_scales = weights, kv_scales
        self.norm_groups = norm_groups or c["n_groups"]
        low, high = dt_limit or c["time_step_limit"]
        self.dt_limit = (float(low), float(high if isinstance(high, int | float) else "inf"))
        self.inner = c["mamba_num_heads"] * c["mamba_head_dim"]
        channels = self.inner + 2 * c["n_groups"] * c["ssm_state_size"]
        mamba = [i for i, letter in enumerate(weights.pattern) if letter == "M"]
        shape = (c["mamba_num_heads"], c["mamba_head_dim"], c["ssm_state_size"])
        self.conv = {i: torch.zeros(channels, c["conv_kernel"] - 1, dtype=torch.float64) for i in mamba}
        self.ssm = {i: torch.zeros(shape, dtype=torch.float64) for i in mamba}
        attention = [i for i, letter in enumerate(weights.pattern) if letter == "*"]
        self.keys: dict[int, list[Tensor]] = {i: [] for i in attention}
        self.values: dict[int, list[Tensor]] = {i: [] for i in attention}

    def read(self, ids: Sequence[int]) -> Tensor:
        """The logits after each of the next tokens, (len(ids), vocab) float64."""
        return torch.stack([self._token(token) for token in ids])

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The best `count` ids after a prompt; among equal ones the lowest."""
        logits, ids = self.read(prompt)[-1], []
        while True:
            ids.append(int(logits.argmax()))
            if len(ids) == count:
                return ids
            logits = self.read(ids[-1:])[-1]

    def _token(self, token: int) -> Tensor:
        w = self.weights
        mixers = {"M": self._mamba, "*": self._attention, "-": self._mlp, "E": self._moe}
        x = w["backbone.embeddings.weight"][token]
        for index, letter in enumerate(w.pattern):
            name = f"backbone.layers.{index}"
            x = x + mixers[letter](f"{name}.mixer", index, self._rms(x, w[f"{name}.norm.weight"]))
        head = "backbone.embeddings" if w.config["tie_word_embeddings"] else "lm_head"
        return w[f"{head}.weight"] @ self._rms(x, w["backbone.norm_f.weight"])

    def _rms(self, x: Tensor, weight: Tensor, groups: int = 1) -> Tensor:
        parts = x.view(groups, -1)
        root = torch.sqrt(parts.square().mean(-1, keepdim=True) + self.weights.config["layer_norm_epsilon"])
        return (parts / root).flatten() * weight

    def _mamba(self, name: str, index: int, x: Tensor) -> Tensor:
        w, c = self.weights, self.weights.config
        heads, groups, state_size = c["mamba_num_heads"], c["n_groups"], c["ssm_state_size"]
        z, raw, dt = (w[f"{name}.in_proj.weight"] @ x).split([self.inner, len(self.conv[index]), heads])
        window = torch.cat([self.conv[index], raw[:, None]], 1)
        self.conv[index] = window[:, 1:]
        convolved = (window * w[f"{name}.conv1d.weight"].squeeze(1)).sum(1)
        if c["use_conv_bias"]:
            convolved = convolved + w[f"{name}.conv1d.bias"]
        u, B, C = _silu(convolved).split([self.inner, groups * state_size, groups * state_size])
        u, B, C = u.view(heads, -1), B.view(groups, -1), C.view(groups, -1)
        step = torch.log1p(torch.exp(dt + w[f"{name}.dt_bias"])).clamp(*self.dt_limit)
        decay = torch.exp(-torch.exp(w[f"{name}.A_log"]) * step)
        of_head = torch.arange(heads) // (heads // groups)
        added = step[:, None, None] * u[:, :, None] * B[of_head][:, None, :]
        self.ssm[index] = decay[:, None, None] * self.ssm[index] + added
        y = (self.ssm[index] * C[of_head][:, None, :]).sum(-1) + w[f"{name}.D"][:, None] * u
        normed = self._rms(y.flatten() * _silu(z), w[f"{name}.norm.weight"], self.norm_groups)
        return w[f"{name}.out_proj.weight"] @ normed

    def _attention(self, name: str, index: int, x: Tensor) -> Tensor:
        w, c = self.weights, self.weights.config
        q, k, v = ((w[f"{name}.{letter}_proj.weight"] @ x).view(-1, c["head_dim"]) for letter in "qkv")
        if self.kv_scales is not None:
            k_scale, v_scale = self.kv_scales[index]
            k, v = _to_e4m3_and_back(k, k_scale), _to_e4m3_and_back(v, v_scale)
        self.keys[index].append(k)
        self.values[index].append(v)
        of_head = torch.arange(len(q)) // (len(q) // len(k))
        keys, values = torch.stack(self.keys[index])[:, of_head], torch.stack(self.values[index])[:, of_head]
        scores = (keys * q).sum(-1) * c["head_dim"] ** -0.5
        return w[f"{name}.o_proj.weight"] @ (torch.softmax(scores, 0)[..., None] * values).sum(0).flatten()

    def _mlp(self, name: str, index: int, x: Tensor) -> Tensor:
        w = self.weights
        return w[f"{name}.down_proj.weight"] @ (w[f"{name}.up_proj.weight"] @ x).clamp(min=0).square()

    def _moe(self, name: str, index: int, x: Tensor) -> Tensor:
        w, c = self.weights, self.weights.config
        scores = torch.sigmoid(w[f"{name}.gate.weight"] @ x)
        choice = scores + w[f"{name}.gate.e_score_correction_bias"]
        by_group = choice.view(c["n_group"], -1)
        group_scores = by_group.topk(min(2, by_group.shape[1])).values.sum(-1)
        kept = group_scores.topk(c["topk_group"]).indices
        allowed = torch.full_like(by_group, -torch.inf)
        allowed[kept] = by_group[kept]
        ids = allowed.flatten().topk(c["num_experts_per_tok"]).indices
        shares = scores[ids] / scores[ids].sum() if c["norm_topk_prob"] else scores[ids]
        is_latent = f"{name}.fc1_latent_proj.weight" in w.tensors
        inputs = w[f"{name}.fc1_latent_proj.weight"] @ x if is_latent else x
        routed = torch.zeros_like(inputs)
        for expert, share in zip(ids.tolist(), shares, strict=True):
            routed = routed + share * self._mlp(f"{name}.experts.{expert}", index, inputs)
        routed = routed * c["routed_scaling_factor"]
        if is_latent:
            routed = w[f"{name}.fc2_latent_proj.weight"] @ routed
        return routed + self._mlp(f"{name}.shared_experts", index, x) if c["n_shared_experts"] else routed
