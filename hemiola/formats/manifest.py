"""What a checkpoint holds for a given model, and its values when they are asked for.

The plan is made from headers (plan.py). Weights are views of the mapped files; scalar scales are read as numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from hemiola.config.model import NemotronHConfig
from hemiola.formats.checkpoint import Checkpoint
from hemiola.formats.declaration import read_declaration
from hemiola.formats.layout import MTP_ROOT
from hemiola.formats.plan import Plan, StoredModule, kv_scale_names
from hemiola.formats.problems import Problems
from hemiola.formats.safetensors import TensorHeader
from hemiola.formats.weight import Scheme, Weight

_TENSOR_SCALE = {Scheme.FP8: "weight_scale", Scheme.NVFP4: "weight_scale_2"}


@dataclass(frozen=True, eq=False)
class Manifest:
    """The plan. Names are canonical ("backbone."), whichever root the files use.

    reports: one sentence per thing that a user should know and that is no error.
    kv_cache_declared: "fp8" when the checkpoint asks for an FP8 KV cache, else None.
    """

    checkpoint: Checkpoint
    modules: tuple[StoredModule, ...]
    reports: tuple[str, ...]
    kv_cache_declared: str | None
    num_kv_scales: int
    num_mtp_tensors: int
    mtp_bytes: int
    _headers: Mapping[str, TensorHeader]  # by canonical name

    @classmethod
    def build(cls, checkpoint: Checkpoint, config: NemotronHConfig) -> Manifest:
        """Match headers against the model; reads no payload.

        Raises: CheckpointError holding every missing, unexpected, misshapen or mistyped tensor and every missing scale;
            ConfigError for a declared quantisation that is unknown.
        """
        declaration = read_declaration(checkpoint.folder, config.quantization)
        plan = Plan(checkpoint, config, declaration)
        return cls(
            checkpoint=checkpoint,
            modules=plan.modules,
            reports=tuple(plan.reports),
            kv_cache_declared=declaration.kv_cache,
            num_kv_scales=plan.num_kv_scales,
            num_mtp_tensors=len(plan.mtp_headers),
            mtp_bytes=sum(header.nbytes for header in plan.mtp_headers),
            _headers=plan.headers,
        )

    def weight(self, name: str) -> Weight:
        """A linear's stored weight, as views. The first call reads and checks all scalar scales of the checkpoint.

        Raises: KeyError for a name that is no linear; CheckpointError naming scales that are not positive and finite.
        """
        stored = self._linears[name]
        is_nvfp4 = stored.scheme is Scheme.NVFP4
        rows, columns = stored.shape
        tensor_scale = _TENSOR_SCALE.get(stored.scheme)
        return Weight(
            name=name,
            shape=(rows, columns),
            scheme=stored.scheme,
            data=self.tensor(f"{name}.weight"),
            block_scale=self.tensor(f"{name}.weight_scale") if is_nvfp4 else None,
            scale=self._scales[f"{name}.{tensor_scale}"] if tensor_scale else None,
            input_scale=self._scales[f"{name}.input_scale"] if stored.has_input_scale else None,
        )

    def tensor(self, name: str) -> Tensor:
        """A tensor in its stored dtype, by its full canonical name, as a view. Raises: KeyError."""
        return self.checkpoint.tensor(self._headers[name].name)

    def kv_scales(self, layer: int) -> tuple[float, float, str]:
        """k_scale and v_scale of an attention layer and where they come from; 1.0 for one that is not stored."""
        names = kv_scale_names(layer)
        k, v = (self._kv_scales.get(name, 1.0) for name in names)
        fallbacks = [name.rpartition(".")[2] for name in names if name not in self._kv_scales]
        if len(fallbacks) == 1:
            return k, v, f"checkpoint, {fallbacks[0]} fallback 1.0"
        return k, v, "fallback 1.0" if fallbacks else "checkpoint"

    @cached_property
    def _linears(self) -> dict[str, StoredModule]:
        return {stored.name: stored for stored in self.modules if stored.is_linear}

    @cached_property
    def _scales(self) -> dict[str, float]:
        """Every scalar scale of the linears, by canonical tensor name."""
        names = []
        for stored in self.modules:
            if stored.scheme is not Scheme.PLAIN:
                names.append(f"{stored.name}.{_TENSOR_SCALE[stored.scheme]}")
                names += [f"{stored.name}.input_scale"] if stored.has_input_scale else []
        return self._read_scalars(names)

    @cached_property
    def _kv_scales(self) -> dict[str, float]:
        """k_scale and v_scale of every attention layer that has them, by canonical tensor name."""
        names = [name for name in self._headers if name.endswith((".k_scale", ".v_scale"))]
        return self._read_scalars([name for name in names if not name.startswith(MTP_ROOT)])

    def _read_scalars(self, names: list[str]) -> dict[str, float]:
        stored = self.checkpoint.scalars([self._headers[name].name for name in names])
        values = dict(zip(names, stored, strict=True))
        problems = Problems()
        for name, value in values.items():
            if not (math.isfinite(value) and value > 0):
                problems.add("scale that is not positive and finite", f"{self._headers[name].name} = {value}")
        problems.raise_if_any(
            self.checkpoint.folder, "The checkpoint is damaged or was not calibrated; export it again."
        )
        return values
