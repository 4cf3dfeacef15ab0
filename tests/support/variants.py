"""Config files of the public Nemotron-H models (true geometry, each in its generation's spelling) and of tiny ones.

The chunk sizes of 9B-v2, 12B-v2, H-4B, H-47B and H-56B are not known from a primary source; 128 and 256 stand in.
"""

from __future__ import annotations

import copy
import math
from typing import Any

NANO_30B = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
ULTRA = "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
NANO_4B = "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-"
NANO_9B = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
NANO_12B = "M-M-M-M*" + "-M-M-M-M*" * 5 + "-M-M-M-M-"
H_8B = "M-M-M-M*" + "-M-M-M-M-M*" * 3 + "-M-M-M-M-M-"
# With a run of three MLP layers and an MM.
H_47B = "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-"
H_56B = "M-M-M-M*" + "-M-M-M-M-M*" * 9 + "-M-M-M-M-M-"

OLD_WORDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
NEW_WORDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}

_SHARED: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "hidden_dropout": 0.0,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "n_groups": 8,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, math.inf],  # json.dumps writes the bare literal Infinity
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "transformers_version": "4.55.4",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}


def _config(hidden: int, heads: tuple[int, int], mamba: tuple[int, int], state: int, /, **more: Any) -> dict[str, Any]:
    """`heads`: query and key/value heads; `mamba`: heads and head_dim."""
    return {
        **_SHARED,
        "hidden_size": hidden,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "mamba_num_heads": mamba[0],
        "mamba_head_dim": mamba[1],
        "ssm_state_size": state,
        **more,
    }


def _string(pattern: str) -> dict[str, Any]:
    return {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}


def _moe(experts: int, per_token: int, inner: int, shared: int, scale: float) -> dict[str, Any]:
    return {
        "n_routed_experts": experts,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": inner,
        "moe_shared_expert_intermediate_size": shared,
        "routed_scaling_factor": scale,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "moe_shared_expert_overlap": False,
        "mamba_ssm_cache_dtype": "float32",
        "chunk_size": 128,
        "head_dim": 128,
        "norm_eps": 1e-05,
        "partial_rotary_factor": 1.0,
        "rope_theta": 10000,
    }


_H_SPELLING: dict[str, Any] = {
    "attention_head_dim": 128,
    "rms_norm_eps": 1e-05,
    "chunk_size": 256,
    "max_position_embeddings": 8192,
}
_V2_SPELLING: dict[str, Any] = {
    "head_dim": 128,
    "mamba_num_groups": 8,
    "mamba_state_dim": 128,
    "rms_norm_eps": 1e-05,
    "chunk_size": 128,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
_INFINITY_OBJECT: dict[str, Any] = {"time_step_limit": [0.0, {"__float__": "Infinity"}]}

PUBLIC: dict[str, dict[str, Any]] = {
    "nano-3-30b-a3b": _config(
        2688,
        (32, 2),
        (64, 64),
        128,
        **_string(NANO_30B),
        **_moe(128, 6, 1856, 3712, 2.5),
        intermediate_size=1856,
        max_position_embeddings=262144,
        torch_dtype="bfloat16",
    ),
    "lightning-30b-a3b": _config(
        2688,
        (32, 2),
        (64, 64),
        128,
        **_string(NANO_30B),
        **_moe(128, 6, 1856, 3712, 2.5),
        intermediate_size=1856,
        max_position_embeddings=1048576,
        moe_latent_size=None,
        num_nextn_predict_layers=1,
        mtp_hybrid_override_pattern="*E",
        dtype="bfloat16",
    ),
    "super-120b-a12b": _config(
        4096,
        (32, 2),
        (128, 64),
        128,
        **_moe(512, 22, 2688, 5376, 5.0),
        **_INFINITY_OBJECT,
        layers_block_type=[OLD_WORDS[letter] for letter in SUPER],
        intermediate_size=5376,
        max_position_embeddings=262144,
        moe_latent_size=1024,
        num_nextn_predict_layers=1,
        mtp_layers_block_type=["attention", "moe"],
        dtype="bfloat16",
    ),
    "ultra-550b-a55b": _config(
        8192,
        (64, 2),
        (256, 64),
        128,
        **_moe(512, 22, 5120, 10240, 5.0),
        **_INFINITY_OBJECT,
        layer_types=[NEW_WORDS[letter] for letter in ULTRA],
        num_hidden_layers=len(ULTRA),
        intermediate_size=10240,
        max_position_embeddings=1048576,
        moe_latent_size=2048,
        num_nextn_predict_layers=1,
        mtp_layers_block_type=["full_attention", "moe"],
        dtype="bfloat16",
    ),
    "nano-3-4b": _config(
        3136,
        (40, 8),
        (96, 80),
        128,
        **_string(NANO_4B),
        head_dim=128,
        intermediate_size=12544,
        chunk_size=256,
        max_position_embeddings=262144,
        mamba_ssm_cache_dtype="float32",
        torch_dtype="bfloat16",
    ),
    "nano-9b-v2": _config(4480, (40, 8), (128, 80), 128, **_string(NANO_9B), **_V2_SPELLING, intermediate_size=15680),
    "nano-12b-v2": _config(
        5120, (40, 8), (128, 80), 128, **_string(NANO_12B), **_V2_SPELLING, intermediate_size=[20480]
    ),
    "h-4b": _config(3072, (32, 8), (112, 64), 128, **_string(H_8B), **_H_SPELLING, intermediate_size=12288),
    "h-8b": _config(4096, (32, 8), (128, 64), 128, **_string(H_8B), **_H_SPELLING, intermediate_size=21504),
    "h-47b": _config(8192, (64, 8), (256, 64), 256, **_string(H_47B), **_H_SPELLING, intermediate_size=30720),
    "h-56b": _config(8192, (64, 8), (256, 64), 256, **_string(H_56B), **_H_SPELLING, intermediate_size=32768),
}


def public(name: str, **overrides: Any) -> dict[str, Any]:
    """A fresh copy of a public model's config file, with keys replaced or added."""
    return {**copy.deepcopy(PUBLIC[name]), **copy.deepcopy(overrides)}


def tiny(pattern: str, **overrides: Any) -> dict[str, Any]:
    """The config file of a small model with all sizes that any layer kind needs; overrides are spelled as in the file.

    Widths are multiples of 16, so that every linear can be stored as NVFP4.
    """
    return {
        **copy.deepcopy(_SHARED),
        **_string(pattern),
        "hidden_size": 64,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "torch_dtype": "float32",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 16,
        "mamba_ssm_cache_dtype": "float32",
        "intermediate_size": 128,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 64,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        **copy.deepcopy(overrides),
    }
