"""From a manifest to a model: every weight goes to its slot, in the form the numerics need.

Linears keep their stored form; vectors are cast once: norms and conv to the activation dtype, A = -exp(A_log), D and
dt_bias to float32.
"""

from __future__ import annotations

import torch

from hemiola.config.model import LayerKind, NemotronHConfig
from hemiola.formats.manifest import Manifest
from hemiola.formats.weight import ExpertBank
from hemiola.model.linear import Linear
from hemiola.model.mixers.attention import AttentionMixer
from hemiola.model.mixers.mamba2 import Mamba2Mixer, Mamba2Parameters
from hemiola.model.mixers.mlp import MLPMixer
from hemiola.model.mixers.moe import MoEMixer, Router
from hemiola.model.nemotron_h import Layer, Mixer, NemotronH
from hemiola.model.specs import KVSpec, StateSpec
from hemiola.ops import Ops


def load_model(
    manifest: Manifest,
    config: NemotronHConfig,
    ops: Ops,
    dtype: torch.dtype,
    router_dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> NemotronH:
    """Bind a checked manifest to a model.

    dtype: activations, float32 or bfloat16. router_dtype: what the router's gate weight is rounded to. device: of
    activations and vectors; matrices go to it when they are first used, or by `NemotronH.warm`.
    """
    return _Loader(manifest, config, ops, dtype, router_dtype, torch.device(device)).model()


class _Loader:
    def __init__(
        self,
        manifest: Manifest,
        config: NemotronHConfig,
        ops: Ops,
        dtype: torch.dtype,
        router_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.manifest, self.config, self.ops = manifest, config, ops
        self.dtype, self.router_dtype, self.device = dtype, router_dtype, device

    def model(self) -> NemotronH:
        head = "backbone.embeddings" if self.config.tie_word_embeddings else "lm_head"
        return NemotronH(
            self.config,
            self.dtype,
            self.manifest.weight("backbone.embeddings"),
            [self.layer(index, kind) for index, kind in enumerate(self.config.layers)],
            self.vector("backbone.norm_f.weight"),
            self.linear(head),
            self.ops,
            self.device,
        )

    def linear(self, name: str) -> Linear:
        return Linear(self.manifest.weight(name), self.dtype, self.ops)

    def vector(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.manifest.tensor(name).to(self.device, dtype or self.dtype)

    def bank(self, name: str, proj: str) -> ExpertBank:
        weights = (self.manifest.weight(f"{name}.{expert}.{proj}") for expert in range(self.config.num_experts))
        return ExpertBank(f"{name}.{proj}", tuple(weights))

    def layer(self, index: int, kind: LayerKind) -> Layer:
        name = f"backbone.layers.{index}"
        build = {
            LayerKind.MAMBA: self.mamba2,
            LayerKind.ATTENTION: self.attention,
            LayerKind.MLP: self.mlp,
            LayerKind.MOE: self.moe,
        }[kind]
        return Layer(self.vector(f"{name}.norm.weight"), build(index, f"{name}.mixer"))

    def mamba2(self, index: int, name: str) -> Mixer:
        c = self.config
        spec = StateSpec(index, c.conv_dim, c.conv_kernel - 1, c.mamba_num_heads, c.mamba_head_dim, c.ssm_state_size)
        parameters = Mamba2Parameters(
            conv_weight=self.vector(f"{name}.conv1d.weight").squeeze(1),
            conv_bias=self.vector(f"{name}.conv1d.bias") if c.use_conv_bias else None,
            A=-torch.exp(self.vector(f"{name}.A_log", torch.float32)),
            D=self.vector(f"{name}.D", torch.float32),
            dt_bias=self.vector(f"{name}.dt_bias", torch.float32),
            norm_weight=self.vector(f"{name}.norm.weight"),
        )
        in_proj, out_proj = self.linear(f"{name}.in_proj"), self.linear(f"{name}.out_proj")
        return Mamba2Mixer(
            spec, in_proj, out_proj, parameters, c.ssm_groups, c.chunk_size, c.time_step_limit, c.norm_eps, self.ops
        )

    def attention(self, index: int, name: str) -> Mixer:
        c = self.config
        k_scale, v_scale, _ = self.manifest.kv_scales(index)
        q, k, v, o = (self.linear(f"{name}.{proj}_proj") for proj in "qkvo")
        spec = KVSpec(index, c.num_key_value_heads, c.head_dim)
        return AttentionMixer(name, spec, q, k, v, o, c.attention_scale, (k_scale, v_scale), self.ops)

    def mlp(self, index: int, name: str) -> MLPMixer:
        return MLPMixer(self.linear(f"{name}.up_proj"), self.linear(f"{name}.down_proj"))

    def moe(self, index: int, name: str) -> Mixer:
        c, weight = self.config, self.manifest.weight
        router = Router(
            weight(f"{name}.gate"),
            self.router_dtype,
            self.vector(f"{name}.gate.e_score_correction_bias", torch.float32),
            c.num_experts_per_tok,
            c.router_groups,
            c.topk_router_groups,
            c.norm_topk_prob,
        )
        return MoEMixer(
            router,
            self.bank(f"{name}.experts", "up_proj"),
            self.bank(f"{name}.experts", "down_proj"),
            c.routed_scaling_factor,
            self.mlp(index, f"{name}.shared_experts") if c.num_shared_experts else None,
            (self.linear(f"{name}.fc1_latent_proj"), self.linear(f"{name}.fc2_latent_proj")) if c.latent_size else None,
            self.ops,
        )
