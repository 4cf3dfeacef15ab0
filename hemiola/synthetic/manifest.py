"""SyntheticManifest: what a checkpoint's manifest offers, with drawn weights on any device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from hemiola.config.model import LayerKind
from hemiola.formats.checkpoint import Checkpoint
from hemiola.formats.declaration import Algorithm
from hemiola.formats.layout import Module, Role, expected_modules
from hemiola.formats.manifest import Manifest
from hemiola.formats.plan import StoredModule
from hemiola.formats.quant import fp8, nvfp4
from hemiola.formats.weight import Scheme, Weight
from hemiola.synthetic.draw import KV_SCALE, Source, fp8_scale, input_scale, nvfp4_scale
from hemiola.synthetic.geometry import Geometry, geometry

_NVFP4_INPUT_RANGE = nvfp4.MAX * fp8.MAX


def open_synthetic(name: str, device: torch.device | str = "cpu", seed: int = 0) -> SyntheticManifest:
    """The manifest of a synthetic model whose weights are drawn on `device`. Raises: ConfigError (no such name)."""
    model, source = geometry(name), Source(torch.device(device), seed)
    return SyntheticManifest(
        checkpoint=Checkpoint(Path(name), {}, (), {}),
        modules=tuple(_stored(module, model.algorithm(module)) for module in expected_modules(model.config)),
        reports=(f"weights of {name} are drawn on {source.device}, and what it says means nothing",),
        kv_cache_declared=model.kv_cache,
        num_kv_scales=2 * model.config.count(LayerKind.ATTENTION) if model.has_kv_scales else 0,
        num_mtp_tensors=0,
        mtp_bytes=0,
        _headers={},
        geometry=model,
        source=source,
        _drawn=[],
    )


class DrawnWeight(Weight):
    """A Weight whose tensors are drawn when they are first read, and again when they are read after `forget`."""

    __slots__ = ("_draw", "_tensors")
    _draw: Callable[[], tuple[Tensor, Tensor | None]]
    _tensors: tuple[Tensor, Tensor | None] | None

    def __init__(
        self,
        module: Module,
        scheme: Scheme,
        draw: Callable[[], tuple[Tensor, Tensor | None]],
        scale: float | None,
        input_scale: float | None,
    ) -> None:
        rows, columns = module.shape
        values = {"name": module.name, "shape": (rows, columns), "scheme": scheme}
        values |= {"scale": scale, "input_scale": input_scale, "_draw": draw, "_tensors": None}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _drawn(self) -> tuple[Tensor, Tensor | None]:
        tensors = self._tensors
        if tensors is None:
            tensors = self._draw()
            object.__setattr__(self, "_tensors", tensors)
        return tensors

    @property
    def data(self) -> Tensor:
        return self._drawn()[0]

    @property
    def block_scale(self) -> Tensor | None:
        return self._drawn()[1]

    @property
    def stored_bytes(self) -> int:
        return stored_bytes(self.shape, self.scheme, self.data.itemsize)

    def forget(self) -> None:
        """Give back the tensors, when a form of them is kept elsewhere."""
        object.__setattr__(self, "_tensors", None)


def stored_bytes(shape: tuple[int, ...], scheme: Scheme, item_bytes: int) -> int:
    """Of codes and block scales, or of a plain tensor's items."""
    size = math.prod(shape)
    if scheme is Scheme.NVFP4:
        return size // 2 + size // nvfp4.BLOCK
    return size if scheme is Scheme.FP8 else size * item_bytes


@dataclass(frozen=True, eq=False)
class SyntheticManifest(Manifest):
    """modules, reports and KV scales as a checkpoint of the geometry has them."""

    geometry: Geometry
    source: Source
    _drawn: list[DrawnWeight]

    def weight(self, name: str) -> Weight:
        module, algorithm = self._modules[name], self.geometry.algorithm(self._modules[name])
        source = self.source
        match algorithm.scheme:
            case Scheme.PLAIN:
                weight = DrawnWeight(module, Scheme.PLAIN, lambda: (source.plain(module), None), None, None)
            case Scheme.FP8:
                scales = fp8_scale(module), input_scale(module, fp8.MAX)
                weight = DrawnWeight(module, Scheme.FP8, lambda: (source.fp8(module), None), *scales)
            case Scheme.NVFP4:
                of_input = input_scale(module, _NVFP4_INPUT_RANGE) if algorithm is Algorithm.NVFP4 else None
                draw = partial(source.nvfp4, module)
                weight = DrawnWeight(module, Scheme.NVFP4, draw, nvfp4_scale(module), of_input)
        self._drawn.append(weight)
        return weight

    def tensor(self, name: str) -> Tensor:
        """A vector by its full name. Raises: KeyError."""
        return self.source.vector(self._modules[name])

    def kv_scales(self, layer: int) -> tuple[float, float, str]:
        return (KV_SCALE, KV_SCALE, "checkpoint") if self.geometry.has_kv_scales else (1.0, 1.0, "fallback 1.0")

    def forget(self) -> None:
        """Give back the memory of all weights drawn so far; what is kept of them elsewhere stays."""
        for weight in self._drawn:
            weight.forget()

    @cached_property
    def _modules(self) -> dict[str, Module]:
        return {module.name: module for module in expected_modules(self.geometry.config)}


def _stored(module: Module, algorithm: Algorithm) -> StoredModule:
    scheme = algorithm.scheme
    is_float = module.role is Role.ROUTER
    num_bytes = stored_bytes(module.shape, scheme, 4 if is_float else 2)
    num_scalars = {Algorithm.PLAIN: 0, Algorithm.FP8: 2, Algorithm.NVFP4: 2, Algorithm.W4A16_NVFP4: 1}[algorithm]
    return StoredModule(
        name=module.name,
        role=module.role,
        layer=module.layer,
        shape=module.shape,
        is_linear=module.is_linear,
        scheme=scheme,
        dtype={Scheme.PLAIN: "F32" if is_float else "BF16", Scheme.FP8: "F8_E4M3", Scheme.NVFP4: "U8"}[scheme],
        stored_bytes=num_bytes,
        resident_bytes=4 * math.prod(module.shape) if module.is_widened else num_bytes,
        num_tensors=1 + num_scalars + (scheme is Scheme.NVFP4),
        num_scalars=num_scalars,
        has_input_scale=num_scalars == 2,
    )
