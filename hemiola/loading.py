"""From a model's name to an engine that can run it: folder, configuration, manifest, ops, model, caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hemiola.config.engine import EngineConfig
from hemiola.config.model import LayerKind, NemotronHConfig
from hemiola.engine.engine import Engine
from hemiola.errors import CheckpointError, ConfigError, UnsupportedPath
from hemiola.formats.checkpoint import Checkpoint
from hemiola.formats.hub import resolve
from hemiola.formats.manifest import Manifest
from hemiola.formats.readahead import reading_ahead
from hemiola.model.load import load_model
from hemiola.model.nemotron_h import NemotronH
from hemiola.ops import KeptForms, Ops, ResidentWeights
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
    ops, device = bind_ops(config)
    with reading_ahead(manifest.checkpoint.files if ops.resident is not None else ()):
        nemotron_h = bind_model(manifest, model_config, config, ops, device)
        if ops.resident is not None:
            warm(nemotron_h)
    eos_token_ids = read_eos_token_ids(folder) or model_config.eos_token_ids
    engine = bind_engine(nemotron_h, manifest, config, eos_token_ids, tap)
    engine.compile()
    return Loaded(folder, model_config, manifest, engine, Tokenizer.from_folder(folder))


def bind_ops(config: EngineConfig) -> tuple[Ops, torch.device]:
    """The op table of an engine and the device of its activations.

    Raises: UnsupportedPath when the device arm is asked for where there is no GPU or no Triton.
    """
    arms = config.arms
    if arms == "auto":
        arms = "device" if config.device != "cpu" and torch.cuda.is_available() else "reference"
    uses_device = "device" in ({arms} if isinstance(arms, str) else set(arms.values()))
    name = config.device if config.device != "auto" else "cuda" if uses_device else "cpu"
    if (name == "cuda" or uses_device) and not torch.cuda.is_available():
        raise UnsupportedPath(
            "there is no GPU for the device arm",
            found="no CUDA device",
            expected="an NVIDIA GPU that torch can use",
            where=f"arms={config.arms}, device={config.device}",
            remedy="Run with arms=reference and device=cpu.",
        )
    if uses_device and name == "cpu":
        raise ConfigError("the device arm runs on a GPU", found="device=cpu", expected="device=cuda", where="device")
    device = torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)
    kept = KeptForms(config.expanded_bytes, device)
    resident = ResidentWeights(device) if uses_device else None
    return Ops(arms, kept, resident, strict=config.strict, invariant=config.invariant), device


def bind_model(
    manifest: Manifest, model_config: NemotronHConfig, config: EngineConfig, ops: Ops, device: torch.device
) -> NemotronH:
    """The model of a manifest in the numeric mode that is set, bound to an op table."""
    dtype = activation_dtype(config, model_config)
    router_dtype = dtype if config.router_dtype == "auto" else _TORCH_DTYPES[config.router_dtype]
    return load_model(manifest, model_config, ops, dtype, router_dtype, device)


def bind_engine(
    model: NemotronH,
    manifest: Manifest,
    config: EngineConfig,
    eos_token_ids: Sequence[int],
    tap: Tap | None = None,
) -> Engine:
    """An engine over a model, with its caches in the memory that the weights leave."""
    resident, share = model.ops.resident, config.gpu_memory_utilization
    if resident is None:
        if share is not None:
            raise ConfigError(
                "this engine uses no GPU", found=share, expected="cache_bytes", where="gpu_memory_utilization"
            )
        weight_bytes, available = sum(module.resident_bytes for module in manifest.modules), None
    else:
        weight_bytes, available = resident.resident_bytes, available_device_memory(model.ops)
        if share is not None:
            available = part_of_memory(torch.cuda.mem_get_info(resident.device)[1], available, share)
    return Engine(
        model,
        config,
        eos_token_ids=eos_token_ids,
        weight_bytes=weight_bytes,
        available_bytes=available,
        kv_dtype=torch.float8_e4m3fn if kv_is_fp8(config, manifest) else model.dtype,
        tap=tap,
    )


def warm(model: NemotronH) -> None:
    """Bring all weights to the device, with a bar on a terminal."""
    assert model.ops.resident is not None, "an engine without a device has nothing to bring there"
    columns = (TextColumn("loading weights"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(model.layers))
        model.warm(lambda done: progress.update(task, completed=done))
        torch.cuda.synchronize()
    model.ops.resident.release_staging()


def available_device_memory(ops: Ops) -> int:
    """Bytes of device memory for an engine whose weights are there already, they included."""
    assert ops.resident is not None, "an engine without a device"
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(ops.resident.device)[0] + ops.resident.resident_bytes


def part_of_memory(total: int, available: int, share: float) -> int:
    """Bytes for an engine that may bring a device of `total` bytes, of which it could have `available`, to `share`."""
    return int(total * share) - (total - available)


def activation_dtype(config: EngineConfig, model_config: NemotronHConfig) -> torch.dtype:
    if config.dtype != "auto":
        return _TORCH_DTYPES[config.dtype]
    return torch.float32 if model_config.dtype == "float32" else torch.bfloat16


def kv_is_fp8(config: EngineConfig, manifest: Manifest) -> bool:
    return _asks_for_fp8_kv(manifest) if config.kv_cache_dtype == "auto" else config.kv_cache_dtype == "fp8"


def _asks_for_fp8_kv(manifest: Manifest) -> bool:
    """Whether the checkpoint declares an FP8 KV cache or, undeclared, stores scales for one."""
    return manifest.kv_cache_declared == "fp8" or manifest.num_kv_scales > 0
