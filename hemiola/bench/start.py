"""An engine for a benchmark, and how long each phase of its start took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hemiola.config.engine import EngineConfig
from hemiola.config.model import NemotronHConfig
from hemiola.engine.engine import Engine
from hemiola.formats.manifest import Manifest
from hemiola.loading import activation_dtype, available_device_memory, bind_ops, kv_is_fp8, open_manifest
from hemiola.model.load import load_model
from hemiola.synthetic import SyntheticManifest, open_synthetic


@dataclass(frozen=True, slots=True)
class Started:
    """phases: seconds, in order."""

    name: str
    is_synthetic: bool
    config: NemotronHConfig
    manifest: Manifest
    engine: Engine
    device: torch.device
    phases: dict[str, float]

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def start(model: str | None, synthetic: str | None, config: EngineConfig) -> Started:
    """An engine for a checkpoint (None: the shipped model) or for a synthetic one, which wins where it is given.

    Raises: ConfigError, CheckpointError, CapacityError, UnsupportedPath.
    """
    phases: dict[str, float] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        phases[name] = time.perf_counter() - begin

    with phase("ops"):
        ops, device = bind_ops(config)
    drawn: SyntheticManifest | None = None
    manifest: Manifest
    with phase("headers"):
        if synthetic is not None:
            manifest = drawn = open_synthetic(synthetic, device)
            name, model_config = synthetic, drawn.geometry.config
        else:
            folder, model_config, manifest = open_manifest(model)
            name = str(folder)
    dtype = activation_dtype(config, model_config)
    router_dtype = {"auto": dtype, "bf16": torch.bfloat16, "float32": torch.float32}[config.router_dtype]
    with phase("model"):
        nemotron_h = load_model(manifest, model_config, ops, dtype, router_dtype, device)
    with phase("weights"):
        if ops.resident is not None:

            def forget(done: int) -> None:
                """What was drawn for a layer is in the way of the next one's."""
                if drawn is not None:
                    drawn.forget()

            nemotron_h.warm(forget)
            forget(len(nemotron_h.layers))
            ops.resident.release_staging()
            torch.cuda.synchronize(device)
    with phase("engine"):
        engine = Engine(
            nemotron_h,
            config,
            eos_token_ids=model_config.eos_token_ids,
            weight_bytes=ops.resident.resident_bytes
            if ops.resident is not None
            else sum(module.resident_bytes for module in manifest.modules),
            available_bytes=available_device_memory(ops) if ops.resident is not None else None,
            kv_dtype=torch.float8_e4m3fn if kv_is_fp8(config, manifest) else dtype,
        )
    return Started(name, synthetic is not None, model_config, manifest, engine, device, phases)
