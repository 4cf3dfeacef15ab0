"""What a record says of an engine and of its checkpoint, in JSON's types: enough to tell whether two are the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path as FilePath
from typing import Any

import torch

from hemiola.config.model import NemotronHConfig
from hemiola.engine.engine import Engine
from hemiola.evidence.identity import config_fields
from hemiola.formats.manifest import Manifest
from hemiola.formats.plan import StoredModule
from hemiola.formats.weight import Scheme
from hemiola.loading import kv_is_fp8
from hemiola.ops import Path

_DTYPES = {"bfloat16": "bf16"}  # as EngineConfig calls them, where torch has another name


def dtype_name(dtype: torch.dtype) -> str:
    """As goldens have it, and EngineConfig."""
    name = str(dtype).removeprefix("torch.")
    return _DTYPES.get(name, name)


def numeric_mode(engine: Engine, manifest: Manifest) -> tuple[str, str]:
    """Dtypes of activations and KV cache, by the names that goldens have."""
    dtype = dtype_name(engine.model.dtype)
    return dtype, "fp8" if kv_is_fp8(engine.config, manifest) else dtype


def engine_facts(engine: Engine, manifest: Manifest) -> dict[str, Any]:
    """arms: of every op, as they are bound, so that "auto" is no arm. cuda_graphs: whether steps of decodes are
    replayed, not whether they may be."""
    config = engine.config
    dtype, kv_dtype = numeric_mode(engine, manifest)
    return {
        "arms": dict(sorted(engine.model.ops.policy.items())),
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "cuda_graphs": engine.runner.uses_graphs,
        **{name: getattr(config, name) for name in _SETTINGS},
    }


_SETTINGS = (
    *("router_dtype", "invariant", "strict", "overlap", "block_size", "max_num_batched_tokens", "max_num_seqs"),
    *("max_model_len", "cache_bytes", "prefix_caching"),
)


def model_facts(
    name: str, manifest: Manifest, config: NemotronHConfig, checkpoint_sha256: str | None
) -> dict[str, Any]:
    """name: as the user gave it, a path or a hub id; its last part is kept. checkpoint_sha256: None for drawn weights.
    stored: how the linears of each role are stored."""
    plain = json.dumps(config_fields(config), sort_keys=True, separators=(",", ":"))
    return {
        "name": FilePath(name).resolve().name,
        "checkpoint_sha256": checkpoint_sha256,
        "config_sha256": hashlib.sha256(plain.encode()).hexdigest(),
        "stored": sorted({f"{m.role.value}: {_stored(m)}" for m in manifest.modules if m.is_linear}),
        "has_kv_scales": manifest.num_kv_scales > 0,
    }


def _stored(module: StoredModule) -> str:
    """A dtype, or a quant_algo by its name in the checkpoints' files."""
    match module.scheme:
        case Scheme.PLAIN:
            return module.dtype
        case Scheme.FP8:
            return "FP8"
        case Scheme.NVFP4:
            return "NVFP4" if module.has_input_scale else "W4A16_NVFP4"


def path_facts(counts: Iterable[tuple[Path, int]]) -> list[dict[str, Any]]:
    return [{**path._asdict(), "calls": calls} for path, calls in sorted(counts)]
