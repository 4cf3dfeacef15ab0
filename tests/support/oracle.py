"""An oracle in float32 on the CPU: transformers' own Nemotron-H, with its known dt clamp removed.

transformers (<= 5.24) clamps dt to [time_step_min, inf) in its prefill path only, and ignores the configuration's
time_step_limit (huggingface/transformers PR 48989); `build` puts the configuration's limit back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import NemotronHConfig, NemotronHForCausalLM


def config(pattern: str, **overrides: Any) -> NemotronHConfig:
    """A small transformers configuration of any pattern."""
    values: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "hybrid_override_pattern": pattern,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "chunk_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 64,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
        "moe_latent_size": None,
        "max_position_embeddings": 4096,
        "initializer_range": 0.15,
        "rescale_prenorm_residual": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return NemotronHConfig(**(values | overrides))


def build(config: NemotronHConfig, seed: int = 0) -> NemotronHForCausalLM:
    """A seeded float32 model in which every parameter matters (no ones, no zeros) and states decay slowly."""
    torch.manual_seed(seed)
    model = NemotronHForCausalLM(config).eval().float()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("norm.weight", "norm_f.weight", ".D")):
                tensor.uniform_(0.5, 1.5)
            elif name.endswith("e_score_correction_bias"):
                tensor.normal_(std=0.2)
            elif name.endswith("conv1d.bias"):
                tensor.normal_(std=0.1)
            elif name.endswith("conv1d.weight"):
                tensor.normal_(std=0.8)
            elif name.endswith("A_log"):
                tensor.uniform_(-4.0, 1.0)
            elif name.endswith("dt_bias"):
                tensor.uniform_(-3.0, 0.5)
            elif name.endswith("gate.weight"):
                tensor.normal_(std=0.4)
    limit = tuple(float(bound) for bound in model.config.time_step_limit)
    for layer in model.model.layers:
        if layer.block_type == "linear_attention":
            layer.mixer.time_step_limit = limit
    return model


@torch.inference_mode()
def logits(model: NemotronHForCausalLM, ids: list[int]) -> torch.Tensor:
    """Every position's logits, (len(ids), vocab) float32, in one go and without a cache."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


@torch.inference_mode()
def greedy(model: NemotronHForCausalLM, ids: list[int], count: int) -> list[int]:
    """`count` greedy tokens, the whole sequence recomputed for each."""
    tokens = list(ids)
    for _ in range(count):
        tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(ids) :]


def save(model: NemotronHForCausalLM, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder
