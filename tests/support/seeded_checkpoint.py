"""The seeded checkpoint that the recorded goldens were taken on, in the four public layouts.

Twelve layers `MEM*EM-MEM*E`, hidden 256. Each tensor is drawn from its own generator, keyed by seed and name, so that
the same seed gives the same bytes everywhere; tests/data/golden/golden-SCHEME.json records the sha256 over all of them.

Schemes, as the public exports lay them out:
bf16       nothing quantised
fp8        mamba projections, dense MLP, experts and shared experts FP8 W8A8; declared in hf_quant_config.json
nvfp4      the MLPs and all but one mamba layer NVFP4 with input_scale; declared in hf_quant_config.json
lightning  mamba projections FP8 W8A8, MLPs and lm_head weight-only NVFP4; declared in config.json as MIXED_PRECISION

WIDE is lightning with Mamba-2 layers of the 30B-A3B models' size, for what runs on no smaller ones.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from hemiola.formats.quant import fp8, nvfp4

SCHEMES = ("bf16", "fp8", "nvfp4", "lightning")
WIDE = "lightning-wide"
PATTERN = "MEM*EM-MEM*E"
CONFIG: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "torch_dtype": "bfloat16",
    "hidden_size": 256,
    "num_hidden_layers": len(PATTERN),
    "hybrid_override_pattern": PATTERN,
    "vocab_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": False,
    "mamba_num_heads": 16,
    "mamba_head_dim": 32,
    "n_groups": 4,
    "ssm_state_size": 64,
    "conv_kernel": 4,
    "expand": 2,
    "chunk_size": 64,
    "use_conv_bias": True,
    "use_bias": False,
    "mamba_proj_bias": False,
    "mamba_hidden_act": "silu",
    "mamba_ssm_cache_dtype": "float32",
    "time_step_min": 0.001,
    "time_step_max": 0.1,
    "time_step_floor": 1e-4,
    "time_step_limit": [0.0, 1e30],
    "intermediate_size": 512,
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "n_routed_experts": 32,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 256,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "residual_in_fp32": False,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

WIDE_SIZES = {"mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "chunk_size": 128}

# Per tensor: the shape, then either one standard deviation of a normal or the two bounds of a uniform distribution.
Recipe = tuple[tuple[int, ...], float | tuple[float, float]]


def _mlp(hidden: int, intermediate: int, up: float, down: float) -> dict[str, Recipe]:
    return {
        "up_proj.weight": ((intermediate, hidden), up * hidden**-0.5),
        "down_proj.weight": ((hidden, intermediate), down * intermediate**-0.5),
    }


def _mixer_recipes(letter: str, c: dict[str, Any]) -> dict[str, Recipe]:
    hidden, heads = c["hidden_size"], c["mamba_num_heads"]
    if letter == "M":
        inner = heads * c["mamba_head_dim"]
        channels = inner + 2 * c["n_groups"] * c["ssm_state_size"]
        return {
            "in_proj.weight": ((inner + channels + heads, hidden), 0.7 * hidden**-0.5),
            "conv1d.weight": ((channels, 1, c["conv_kernel"]), 0.6),
            "conv1d.bias": ((channels,), 0.1),
            "A_log": ((heads,), (-3.0, 1.0)),
            "D": ((heads,), (0.5, 1.5)),
            "dt_bias": ((heads,), (-3.0, 0.5)),
            "norm.weight": ((inner,), (0.7, 1.3)),
            "out_proj.weight": ((hidden, inner), 0.3 * inner**-0.5),
        }
    if letter == "*":
        query, key_value = (c[f"num_{kind}_heads"] * c["head_dim"] for kind in ("attention", "key_value"))
        return {
            "q_proj.weight": ((query, hidden), 0.9 * hidden**-0.5),
            "k_proj.weight": ((key_value, hidden), 0.9 * hidden**-0.5),
            "v_proj.weight": ((key_value, hidden), hidden**-0.5),
            "o_proj.weight": ((hidden, query), 0.75 * query**-0.5),
        }
    if letter == "-":
        return _mlp(hidden, c["intermediate_size"], 1.0, 0.32)
    recipes: dict[str, Recipe] = {
        "gate.weight": ((c["n_routed_experts"], hidden), 1.5 * hidden**-0.5),
        "gate.e_score_correction_bias": ((c["n_routed_experts"],), 0.05),
    }
    expert = _mlp(hidden, c["moe_intermediate_size"], 0.45, 0.36)
    for index in range(c["n_routed_experts"]):
        recipes |= {f"experts.{index}.{name}": recipe for name, recipe in expert.items()}
    shared = _mlp(hidden, c["moe_shared_expert_intermediate_size"], 0.45, 0.36)
    return recipes | {f"shared_experts.{name}": recipe for name, recipe in shared.items()}


def _recipes(config: dict[str, Any]) -> Iterator[tuple[str, Recipe]]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield "backbone.embeddings.weight", ((vocab, hidden), 1.0)
    for layer, letter in enumerate(PATTERN):
        yield f"backbone.layers.{layer}.norm.weight", ((hidden,), (0.7, 1.3))
        for name, recipe in _mixer_recipes(letter, config).items():
            yield f"backbone.layers.{layer}.mixer.{name}", recipe
    yield "backbone.norm_f.weight", ((hidden,), (0.7, 1.3))
    yield "lm_head.weight", ((vocab, hidden), 4.0 * hidden**-0.5)


def _draw(seed: int, name: str, recipe: Recipe) -> Tensor:
    generator = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
    shape, spread = recipe
    if isinstance(spread, tuple):
        return torch.from_numpy(generator.uniform(*spread, shape).astype(np.float32))
    return torch.from_numpy(generator.standard_normal(shape).astype(np.float32) * spread)


def _algorithm(module: str, scheme: str) -> str | None:
    """quant_algo of a linear, None where it stays as drawn."""
    is_mamba, is_mlp = module.endswith((".in_proj", ".out_proj")), module.endswith((".up_proj", ".down_proj"))
    if scheme == "fp8":
        return "FP8" if is_mamba or is_mlp else None
    if scheme == "nvfp4":
        return "NVFP4" if is_mlp or (is_mamba and ".layers.2." not in module) else None
    if scheme == "lightning":
        return "FP8" if is_mamba else "W4A16_NVFP4" if is_mlp or module == "lm_head" else None
    return None


def _pack_ties_down(w: Tensor, block_scale: Tensor, scale: float) -> Tensor:
    """Codes as the recorded checkpoints have them: halfway values go to the smaller magnitude, not to the even code."""
    step = block_scale.float() * torch.tensor(scale)
    x = w.view(*block_scale.shape, nvfp4.BLOCK) / step[..., None]
    magnitudes = nvfp4.VALUES[:8]
    codes = torch.bucketize(x.abs(), (magnitudes[1:] + magnitudes[:-1]) / 2) | (x < 0).long() << 3
    return nvfp4.pack(codes.to(torch.uint8).view(w.shape))


def quantized(
    module: str, w: Tensor, algorithm: str, activation_amax: float, ties_down: bool = False
) -> dict[str, Tensor]:
    """The tensors of one linear as a public export stores them; w: (out, in) float32."""
    if algorithm == "FP8":
        codes, scale = fp8.encode(w)
        tensors = {"weight": codes, "weight_scale": torch.tensor(scale)}
    else:
        packed, block_scale, scale = nvfp4.encode(w)
        if ties_down:
            packed = _pack_ties_down(w, block_scale, scale)
        tensors = {"weight": packed, "weight_scale": block_scale, "weight_scale_2": torch.tensor(scale)}
    if algorithm != "W4A16_NVFP4":
        largest = fp8.MAX if algorithm == "FP8" else nvfp4.MAX * fp8.MAX
        tensors["input_scale"] = torch.tensor(activation_amax / largest)
    return {f"{module}.{name}": tensor for name, tensor in tensors.items()}


def _activation_amax(module: str, algorithm: str) -> float:
    if algorithm != "FP8":
        return 8.0
    return 12.0 if module.endswith((".out_proj", ".down_proj")) else 6.0


def write_shards(folder: Path, tensors: dict[str, Tensor], shards: int) -> None:
    """Deal tensors, by sorted name, to shards with an index."""
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name].contiguous() for name in sorted(tensors)[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def write_seeded_checkpoint(folder: Path, scheme: str, seed: int = 7, shards: int = 2) -> str:
    """Write the checkpoint and its JSON files into `folder`; returns the sha256 over names and payloads."""
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(CONFIG)
    if scheme == WIDE:
        config, scheme = config | WIDE_SIZES, "lightning"
    tensors: dict[str, Tensor] = {}
    algorithms: dict[str, str] = {}
    exclusions = [f"backbone.layers.{layer}.mixer.conv1d" for layer, kind in enumerate(PATTERN) if kind == "M"]
    for name, recipe in _recipes(config):
        w, module = _draw(seed, name, recipe), name.removesuffix(".weight")
        is_linear = w.dim() == 2 and module != "backbone.embeddings"
        algorithm = _algorithm(module, scheme) if is_linear else None
        if algorithm:
            algorithms[module] = algorithm
            tensors |= quantized(module, w, algorithm, _activation_amax(module, algorithm), ties_down=True)
            continue
        tensors[name] = w if ".gate." in name else w.to(torch.bfloat16)
        exclusions += [module] if is_linear else []
    write_shards(folder, tensors, shards)
    if scheme == "lightning":
        config["quantization_config"] = mixed_precision(algorithms, sorted(exclusions))
    elif scheme != "bf16":
        quantization = {
            "quant_algo": scheme.upper(),
            "kv_cache_quant_algo": None,
            "exclude_modules": sorted(exclusions),
        }
        if scheme == "nvfp4":
            quantization["group_size"] = 16
        document = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": quantization}
        (folder / "hf_quant_config.json").write_text(json.dumps(document, indent=1))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def mixed_precision(algorithms: dict[str, str], exclusions: list[str]) -> dict[str, Any]:
    """A quantization_config that declares each module's own algorithm."""
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "producer": {"name": "modelopt"},
        "ignore": exclusions,
        "quantized_layers": {
            module: {"quant_algo": algorithm} | ({"group_size": 16} if "NVFP4" in algorithm else {})
            for module, algorithm in sorted(algorithms.items())
        },
    }
