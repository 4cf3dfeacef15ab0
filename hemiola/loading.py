"""From a model's name to an engine that can run it: folder, configuration, manifest, ops, model, caches."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch

from hemiola.config.engine import EngineConfig
from hemiola.config.model import LayerKind, NemotronHConfig
from hemiola.engine.engine import Engine
from hemiola.errors import CheckpointError
from hemiola.formats.checkpoint import Checkpoint
from hemiola.formats.hub import resolve
from hemiola.formats.manifest import Manifest
from hemiola.model.load import load_model
from hemiola.ops import KeptForms, Ops
from hemiola.tap import Tap
from hemiola.text.tokenizer import Tokenizer, read_eos_token_ids

_TORCH_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


def shipped_model() -> Path:
    """Folder of the small model that comes with the package. Raises: CheckpointError when it is not installed."""
    folder = Path(str(files("hemiola"))) / "shipped"
    if not (folder / "config.json").is_file():
        raise CheckpointError("the model that comes with hemiola is not here", where=folder, remedy="Name a model.")
    return folder


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine and what it was made from. tokenizer is None for a checkpoint without one (ids only)."""

    folder: Path
    config: NemotronHConfig
    manifest: Manifest
    engine: Engine
    tokenizer: Tokenizer | None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know and that is no error: unknown keys, disagreements, clamped settings, fallbacks."""
        notes = [*self.config.warnings, *self.manifest.reports, *self.engine.notes]
        # The manifest reports missing KV scales where the checkpoint asks for an FP8 cache; here a setting did.
        is_set = self.engine.config.kv_cache_dtype == "fp8" and self.config.count(LayerKind.ATTENTION) > 0
        if is_set and not _asks_for_fp8_kv(self.manifest):
            notes.append("kv_cache_dtype fp8: the checkpoint has no KV scales, 1.0 is used in every attention layer")
        return tuple(notes)


def open_manifest(model: str | Path | None, revision: str | None = None) -> tuple[Path, NemotronHConfig, Manifest]:
    """Configuration and manifest of a folder, a hub id, or (None) the shipped model; from headers, no weights read."""
    folder = shipped_model() if model is None else resolve(str(model), revision)
    config = NemotronHConfig.from_folder(folder)
    return folder, config, Manifest.build(Checkpoint.open(folder), config)


def load(
    model: str | Path | None = None,
    config: EngineConfig | None = None,
    *,
    revision: str | None = None,
    tap: Tap | None = None,
) -> Loaded:
    """An engine for `model`: a folder, a hub id, or None for the shipped model.

    Raises: ConfigError, CheckpointError (before any weight is read), CapacityError (the cache budget is too small).
    """
    config = config or EngineConfig()
    folder, model_config, manifest = open_manifest(model, revision)
    dtype = activation_dtype(config, model_config)
    router_dtype = dtype if config.router_dtype == "auto" else _TORCH_DTYPES[config.router_dtype]
    ops = Ops(config.arms, KeptForms(config.expanded_bytes), strict=config.strict)
    engine = Engine(
        load_model(manifest, model_config, ops, dtype, router_dtype),
        config,
        eos_token_ids=read_eos_token_ids(folder) or model_config.eos_token_ids,
        weight_bytes=sum(module.resident_bytes for module in manifest.modules),
        kv_dtype=torch.float8_e4m3fn if kv_is_fp8(config, manifest) else dtype,
        tap=tap,
    )
    return Loaded(folder, model_config, manifest, engine, Tokenizer.from_folder(folder))


def activation_dtype(config: EngineConfig, model_config: NemotronHConfig) -> torch.dtype:
    if config.dtype != "auto":
        return _TORCH_DTYPES[config.dtype]
    return torch.float32 if model_config.dtype == "float32" else torch.bfloat16


def kv_is_fp8(config: EngineConfig, manifest: Manifest) -> bool:
    return _asks_for_fp8_kv(manifest) if config.kv_cache_dtype == "auto" else config.kv_cache_dtype == "fp8"


def _asks_for_fp8_kv(manifest: Manifest) -> bool:
    """Whether the checkpoint declares an FP8 KV cache or, undeclared, stores scales for one."""
    return manifest.kv_cache_declared == "fp8" or manifest.num_kv_scales > 0
