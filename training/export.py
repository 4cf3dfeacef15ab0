"""Writes a trained model as a BF16 checkpoint in the public Nemotron-H layout, and reads one back.

Also counts what the model weighs once quantised to the Lightning layout, which must stay under ``SHIPPED_LIMIT``.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.model import ModelConfig, NemotronH

SHIPPED_LIMIT = 7_600_000  # bytes, model and tokenizer together
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_EXPERT_GROUPS = ("experts.up_proj", "experts.down_proj")


def config_dict(config: ModelConfig, max_position_embeddings: int) -> dict[str, Any]:
    """The model's ``config.json``, spelled as the public Nemotron-3 Nano one."""
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": len(config.pattern),
        "hybrid_override_pattern": config.pattern,
        "layer_norm_epsilon": config.norm_eps,
        "norm_eps": config.norm_eps,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": False,
        "residual_in_fp32": False,
        "attention_bias": False,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "sliding_window": None,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "intermediate_size": config.moe_intermediate_size,
        "use_bias": False,
        "mamba_proj_bias": False,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": config.mamba_num_heads,
        "mamba_head_dim": config.mamba_head_dim,
        "mamba_ssm_cache_dtype": "float32",
        "n_groups": config.n_groups,
        "ssm_state_size": config.ssm_state_size,
        "conv_kernel": config.conv_kernel,
        "use_conv_bias": True,
        "chunk_size": config.chunk_size,
        "expand": config.mamba_inner // config.hidden_size,
        "time_step_limit": [0.0, float("inf")],
        "n_routed_experts": config.n_routed_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "moe_intermediate_size": config.moe_intermediate_size,
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": config.shared_intermediate_size,
        "routed_scaling_factor": config.routed_scaling_factor,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def model_config(raw: dict[str, Any]) -> ModelConfig:
    """The training geometry of a ``config.json`` written by ``config_dict``."""
    same = {name: raw[name] for name in ModelConfig.__dataclass_fields__ if name in raw}
    return ModelConfig(
        pattern=raw["hybrid_override_pattern"],
        shared_intermediate_size=raw["moe_shared_expert_intermediate_size"],
        **same,
    )


def _expert_names(name: str, count: int) -> list[str]:
    """Public names of the matrices that one stacked parameter holds."""
    prefix, projection = name.rsplit(".", 1)
    if prefix.endswith("shared_experts"):
        return [f"{prefix}.{projection}.weight"]
    return [f"{prefix}.{j}.{projection}.weight" for j in range(count)]


def public_tensors(model: NemotronH) -> dict[str, Tensor]:
    """The model's tensors under their public names: bf16, the router in float32, one matrix per expert."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        dtype = torch.float32 if ".gate." in name else torch.bfloat16
        value = value.detach().to("cpu", dtype)
        if name.endswith(_EXPERT_GROUPS):
            tensors |= {n: matrix.clone() for n, matrix in zip(_expert_names(name, len(value)), value, strict=True)}
        else:
            tensors[name] = value.contiguous()
    return tensors


def shipped_bytes(tensors: dict[str, Tensor]) -> int:
    """Bytes of the tensors and of their safetensors header in the Lightning layout."""
    total = 0
    for name, tensor in tensors.items():
        fp4 = "experts" in name or name == "lm_head.weight"
        fp8 = name.endswith(("in_proj.weight", "out_proj.weight"))
        if (fp4 or fp8) and tensor.shape[-1] % 16:
            raise ValueError(f"{name}: {tensor.shape[-1]} inputs are not a multiple of 16")
        width = 0.5625 if fp4 else 1 if fp8 else tensor.element_size()
        companions = 3 if fp4 else 2  # weight_scale, input_scale, and weight_scale_2 of NVFP4
        total += int(tensor.numel() * width) + 110 + (companions * 115 + 8 if fp4 or fp8 else 0)  # 110: a header entry
    return total


def write_checkpoint(model: NemotronH, tokenizer: Path, out: Path, max_position_embeddings: int) -> None:
    """Writes ``model.safetensors``, the two configuration files and the tokenizer's files into ``out``.

    Raises:
        ValueError: the model and tokenizer would exceed ``SHIPPED_LIMIT`` in the Lightning layout.
    """
    tensors = public_tensors(model)
    size = shipped_bytes(tensors) + sum((tokenizer / name).stat().st_size for name in _TOKENIZER_FILES)
    if size > SHIPPED_LIMIT:
        raise ValueError(f"the quantised model and its tokenizer would take {size} bytes; the limit is {SHIPPED_LIMIT}")
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = config_dict(model.config, max_position_embeddings)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "do_sample": True, "temperature": 0.7}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", "utf-8")
    for name in _TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, out / name)


def load_checkpoint(folder: Path) -> NemotronH:
    """The training model, in float32, of a folder written by ``write_checkpoint``."""
    model = NemotronH(model_config(json.loads((folder / "config.json").read_text("utf-8"))))
    tensors = load_file(folder / "model.safetensors")
    state = {}
    for name in model.state_dict():
        if name.endswith(_EXPERT_GROUPS):
            names = _expert_names(name, 1 if "shared_experts" in name else model.config.n_routed_experts)
            state[name] = torch.stack([tensors[n] for n in names]).float()
        else:
            state[name] = tensors[name].float()
    model.load_state_dict(state)
    return model
