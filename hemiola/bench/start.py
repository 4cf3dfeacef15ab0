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
from hemiola.formats.readahead import reading_ahead
from hemiola.loading import bind_engine, bind_model, bind_ops, open_manifest
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
    with reading_ahead(manifest.checkpoint.files if ops.resident is not None else ()):
        with phase("model"):
            nemotron_h = bind_model(manifest, model_config, config, ops, device)
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
        engine = bind_engine(nemotron_h, manifest, config, model_config.eos_token_ids)
    with phase("kernels"):
        engine.compile()
    return Started(name, synthetic is not None, model_config, manifest, engine, device, phases)
