"""Seeded checkpoints of any small model, in any of the stored schemes, for tests of loading, model and engine."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hemiola.config.model import LayerKind, NemotronHConfig
from hemiola.formats.layout import Module, Role, expected_modules
from tests.support.seeded_checkpoint import mixed_precision, quantized, write_shards

SCHEMES = ("f32", "bf16", "fp8", "nvfp4", "lightning")
_MLP_ROLES = (Role.ROUTED_EXPERTS, Role.SHARED_EXPERTS, Role.MLP)
# Standard deviation of a linear's weight, in units of 1 / sqrt(inputs); 1 where not listed. The router's is large, so
# that small errors do not flip experts; the head's, so that logits differ.
_GAINS = {"gate": 3.0, "lm_head": 4.0, "in_proj": 0.7, "out_proj": 0.3, "down_proj": 0.4, "up_proj": 0.5}


def algorithm_of(module: Module, scheme: str) -> str | None:
    """quant_algo of a module under a whole-model scheme; None where it stays plain."""
    is_mamba, is_mlp = module.role is Role.MAMBA and module.is_quantizable, module.role in _MLP_ROLES
    if scheme == "lightning":
        return "FP8" if is_mamba else "W4A16_NVFP4" if is_mlp or module.role is Role.LM_HEAD else None
    if scheme in ("fp8", "nvfp4"):
        return scheme.upper() if is_mamba or is_mlp else None
    return None


def _draw(module: Module, seed: int, a_log: float, conv_gain: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed << 32 | zlib.crc32(module.name.encode()))
    leaf = module.name.rpartition(".")[2]
    if module.is_linear:
        gain = 1.0 if module.role is Role.EMBEDDING else _GAINS.get(leaf, 1.0) * module.shape[1] ** -0.5
        return torch.randn(module.shape, generator=generator) * gain
    low, high = {
        "A_log": (a_log - 0.5, a_log + 0.5),
        "D": (0.5, 1.5),
        "dt_bias": (-3.0, 0.5),
        "e_score_correction_bias": (-0.1, 0.1),
    }.get(leaf, (0.7, 1.3))
    if ".conv1d." in module.name:
        low, high = (-1.0 * conv_gain, 1.0 * conv_gain) if leaf == "weight" else (-0.2, 0.2)
    return torch.rand(module.shape, generator=generator) * (high - low) + low


def tiny_tensors(
    config: NemotronHConfig,
    scheme: str = "bf16",
    seed: int = 0,
    algorithms: Mapping[str, str | None] | None = None,
    a_log: float = -4.0,
    conv_gain: float = 1.0,
    activation_amax: float = 12.0,
) -> tuple[dict[str, Tensor], dict[str, str], list[str]]:
    """All tensors by name, the quant_algo of each quantised module, and the names of the linears that are not.

    algorithms: quant_algo by module name, over what `scheme` gives. a_log: A_log is drawn within 0.5 of it; -4 decays
    slowly, so that a wrong state shows. conv_gain: multiplies conv weights; 30 makes a stale state change the logits.
    """
    plain_dtype = torch.float32 if scheme == "f32" else torch.bfloat16
    tensors: dict[str, Tensor] = {}
    quantised: dict[str, str] = {}
    plain: list[str] = []
    for module in expected_modules(config):
        w = _draw(module, seed, a_log, conv_gain)
        algorithm = (algorithms or {}).get(module.name, algorithm_of(module, scheme))
        if algorithm:
            quantised[module.name] = algorithm
            tensors |= quantized(module.name, w, algorithm, activation_amax)
        else:
            tensors[module.tensor_name] = w if module.role is Role.ROUTER else w.to(plain_dtype)
            plain += [module.name] if module.is_linear and module.role is not Role.EMBEDDING else []
    return tensors, quantised, plain


def write_tiny_checkpoint(
    folder: Path,
    raw_config: Mapping[str, Any],
    scheme: str = "bf16",
    seed: int = 0,
    shards: int = 1,
    kv_scales: Mapping[int, tuple[float | None, float | None]] | None = None,
    **knobs: Any,
) -> NemotronHConfig:
    """Write config.json and shards of a seeded model into `folder`; returns the config as read.

    scheme: one of SCHEMES. kv_scales: (k_scale, v_scale) by attention layer, None for one that is left out; with it, an
    FP8 KV cache is declared. knobs: see tiny_tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    raw = dict(raw_config)
    config = NemotronHConfig.from_dict(raw)
    tensors, quantised, plain = tiny_tensors(config, scheme, seed, **knobs)
    for layer, scales in (kv_scales or {}).items():
        assert config.layers[layer] is LayerKind.ATTENTION, f"layer {layer} is no attention layer"
        for letter, scale in zip("kv", scales, strict=True):
            if scale is not None:
                tensors[f"backbone.layers.{layer}.mixer.{letter}_proj.{letter}_scale"] = torch.tensor([scale])
    if quantised or kv_scales is not None:
        raw["quantization_config"] = mixed_precision(quantised, plain)
        if kv_scales is not None:
            raw["quantization_config"]["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    write_shards(folder, tensors, shards)
    (folder / "config.json").write_text(json.dumps(raw, indent=1))
    return NemotronHConfig.from_folder(folder)
