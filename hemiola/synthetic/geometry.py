"""The public checkpoints' sizes and scheme maps, by name, and versions of them that fit into a test.

Sources: the config files and quantisation maps of the public checkpoints named in each geometry. Nano-30B-FP8's list of
exclusions is not published; the one here gives the published size. The draft heads are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hemiola.config.model import NemotronHConfig
from hemiola.errors import ConfigError
from hemiola.formats.declaration import Algorithm
from hemiola.formats.layout import Module, Role

TINY = "-tiny"  # suffix of a name: the same schedule's beginning and the same schemes, in small sizes

_FP8, _NVFP4, _PLAIN = Algorithm.FP8, Algorithm.NVFP4, Algorithm.PLAIN
_EXPERTS = (Role.ROUTED_EXPERTS, Role.SHARED_EXPERTS)

NANO_PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
SUPER_PATTERN = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"


@dataclass(frozen=True, slots=True)
class Geometry:
    """raw: the model's config.json, without its quantisation. config: the same, read.

    algorithm: how a quantisable linear is stored. kv_cache: "fp8" where the checkpoint asks for an FP8 cache, and
    has_kv_scales whether it stores scales for it.
    """

    name: str
    raw: Mapping[str, Any]
    config: NemotronHConfig
    algorithm: Callable[[Module], Algorithm]
    kv_cache: str | None
    has_kv_scales: bool


def geometry(name: str) -> Geometry:
    """The geometry of one of NAMES. Raises: ConfigError for another name."""
    full = name.removesuffix(TINY)
    if full not in _GEOMETRIES:
        raise ConfigError("no such synthetic model", found=name, expected=f"one of {', '.join(NAMES)}")
    raw, scheme, kv_cache, has_kv_scales = _GEOMETRIES[full]
    raw = _shrunk(raw) if name.endswith(TINY) else raw
    config = NemotronHConfig.from_dict(raw, name)

    def algorithm(module: Module) -> Algorithm:
        return scheme(module, config.pattern) if module.is_quantizable else _PLAIN

    return Geometry(name, raw, config, algorithm, kv_cache, has_kv_scales)


def _config(
    pattern: str, hidden: int, mamba_heads: int, experts: int, top_k: int, inner: int, scale: float, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "dtype": "bfloat16",
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "hidden_size": hidden,
        "vocab_size": 131072,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": mamba_heads,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "chunk_size": 128,
        "use_conv_bias": True,
        "mamba_ssm_cache_dtype": "float32",
        "n_routed_experts": experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": inner,
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 2 * inner,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": scale,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
        "max_position_embeddings": 262144,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **more,
    }


def _shrunk(raw: Mapping[str, Any]) -> dict[str, Any]:
    has_latent = "moe_latent_size" in raw
    pattern = raw["hybrid_override_pattern"][:12]
    return {
        **raw,
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "hidden_size": 192,
        "vocab_size": 1024,
        "num_attention_heads": 8,
        "head_dim": 32,
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 32,
        "chunk_size": 64,
        "n_routed_experts": 32 if has_latent else 16,
        "num_experts_per_tok": 8 if has_latent else 4,
        "moe_intermediate_size": 112,
        "moe_shared_expert_intermediate_size": 224,
        "max_position_embeddings": 4096,
        **({"moe_latent_size": 64} if has_latent else {}),
    }


_NANO = _config(NANO_PATTERN, 2688, 64, 128, 6, 1856, 2.5)
_LIGHTNING = {**_NANO, "max_position_embeddings": 1048576}
_SUPER = _config(SUPER_PATTERN, 4096, 128, 512, 22, 2688, 5.0, moe_latent_size=1024)


def _lightning(module: Module, pattern: str) -> Algorithm:
    if module.role is Role.MAMBA:
        return _FP8
    return Algorithm.W4A16_NVFP4 if module.role in (*_EXPERTS, Role.LM_HEAD) else _PLAIN


def _precedes_attention(module: Module, pattern: str) -> bool:
    assert module.layer is not None, module.name
    return pattern[module.layer + 1 : module.layer + 2] == "*"


def _nano(algorithm: Algorithm) -> Callable[[Module, str], Algorithm]:
    """Experts, shared experts and the mamba layers that do not stand before an attention layer."""

    def scheme(module: Module, pattern: str) -> Algorithm:
        if module.role is Role.MAMBA:
            return _PLAIN if _precedes_attention(module, pattern) else algorithm
        return algorithm if module.role in _EXPERTS else _PLAIN

    return scheme


_IN_PROJ = {0, 2, 4, 6, 9, 11, 13, 15, 18, 20, 27, 29, 31, 40, 49, 51, 53, 55, 57, 60, 62, 66, 68, 71, 73, 82, 84, 86}
_OUT_PROJ = {
    *(0, 2, 4, 9, 11, 13, 18, 38, 40, 42, 44, 49, 51, 53, 55, 57, 60, 62, 64, 66, 68, 71, 73, 75, 77, 80, 82, 84, 86),
}
# Layers whose module of this name is FP8; the rest of the module's layers stay as they are.
_SUPER_FP8 = {"in_proj": _IN_PROJ, "out_proj": _OUT_PROJ, "fc1_latent_proj": {1, 3, 5}, "fc2_latent_proj": {3}}
_SUPER_FP8["o_proj"] = {69, 78}


def _super(module: Module, pattern: str) -> Algorithm:
    leaf = module.name.rpartition(".")[2]
    if module.role is Role.ROUTED_EXPERTS:
        return _NVFP4
    if module.role is Role.SHARED_EXPERTS:
        if leaf == "up_proj":
            return _PLAIN if module.layer == 41 else _FP8
        return {1: _NVFP4, 8: _PLAIN, 76: _PLAIN}.get(module.layer or 0, _FP8)
    return _FP8 if module.layer in _SUPER_FP8.get(leaf, ()) else _PLAIN


_GEOMETRIES: dict[str, tuple[dict[str, Any], Callable[[Module, str], Algorithm], str | None, bool]] = {
    "lightning-30b": (_LIGHTNING, _lightning, "fp8", True),  # Nemotron-3.5-Lightning-30B-A3B-NVFP4
    "nano-nvfp4-30b": (_NANO, _nano(_NVFP4), "fp8", False),  # Nemotron-3-Nano-30B-A3B-NVFP4
    "nano-fp8-30b": (_NANO, _nano(_FP8), None, False),  # Nemotron-3-Nano-30B-A3B-FP8
    "nano-bf16-30b": (_NANO, lambda module, pattern: _PLAIN, None, False),  # Nemotron-3-Nano-30B-A3B-BF16
    "super-120b": (_SUPER, _super, "fp8", True),  # Nemotron-3-Super-120B-A12B-NVFP4
}
NAMES = (*_GEOMETRIES, *(f"{name}{TINY}" for name in _GEOMETRIES))
