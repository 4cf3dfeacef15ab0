"""A synthetic model as a checkpoint folder: config.json, shards and an index, as the public exports lay them out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hemiola.config.model import LayerKind
from hemiola.formats.checkpoint import INDEX
from hemiola.formats.declaration import Algorithm
from hemiola.formats.layout import Role, expected_modules
from hemiola.formats.plan import kv_scale_names
from hemiola.formats.quant import nvfp4
from hemiola.formats.weight import Scheme
from hemiola.synthetic.geometry import Geometry
from hemiola.synthetic.manifest import SyntheticManifest, open_synthetic

SHARD_BYTES = 4 << 30


def write_checkpoint(
    name: str, folder: Path, device: torch.device | str = "cpu", seed: int = 0, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the synthetic model `name` into `folder`, which is made; weights are drawn on `device`.

    Raises: ConfigError for an unknown name, OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    manifest = open_synthetic(name, device, seed)
    weight_map: dict[str, str] = {}
    total = 0
    with ThreadPoolExecutor(1) as writer:  # draws a shard while the one before it is written
        written = None
        for number, shard in enumerate(_shards(manifest, shard_bytes), start=1):
            file = f"model-{number:05d}.safetensors"
            weight_map |= dict.fromkeys(shard, file)
            total += sum(tensor.nbytes for tensor in shard.values())
            if written is not None:
                written.result()
            written = writer.submit(save_file, shard, folder / file, metadata={"format": "pt"})
        if written is not None:
            written.result()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=1))
    raw = {**manifest.geometry.raw, "quantization_config": _declaration(manifest.geometry)}
    (folder / "config.json").write_text(json.dumps(raw, indent=1))


def _shards(manifest: SyntheticManifest, shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Tensors on the CPU, in forward order, so many that a shard holds at least shard_bytes."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in _tensors(manifest):
        shard[name] = tensor.to("cpu").contiguous()
        size += tensor.nbytes
        if size >= shard_bytes:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


def _tensors(manifest: SyntheticManifest) -> Iterator[tuple[str, Tensor]]:
    config = manifest.geometry.config
    for module in expected_modules(config):
        if not module.is_linear:
            yield module.name, manifest.tensor(module.name)
            continue
        weight = manifest.weight(module.name)
        yield module.tensor_name, weight.data
        if weight.block_scale is not None:
            yield f"{module.name}.weight_scale", weight.block_scale
        if weight.scale is not None:
            suffix = "weight_scale" if weight.scheme is Scheme.FP8 else "weight_scale_2"
            yield f"{module.name}.{suffix}", torch.tensor(weight.scale)
        if weight.input_scale is not None:
            yield f"{module.name}.input_scale", torch.tensor(weight.input_scale)
        manifest.forget()
    if manifest.geometry.has_kv_scales:
        for layer in config.indices(LayerKind.ATTENTION):
            for name, scale in zip(kv_scale_names(layer), manifest.kv_scales(layer)[:2], strict=True):
                yield name, torch.tensor([scale])


def _declaration(model: Geometry) -> dict[str, Any] | None:
    """quantization_config, in the spelling of the mixed exports; None for a model without quantised modules."""
    quantised: dict[str, dict[str, Any]] = {}
    excluded = []
    for module in expected_modules(model.config):
        algorithm = model.algorithm(module)
        if algorithm is not Algorithm.PLAIN:
            group = {"group_size": nvfp4.BLOCK} if algorithm.scheme is Scheme.NVFP4 else {}
            quantised[module.name] = {"quant_algo": algorithm.value, **group}
        elif module.is_linear and module.role is not Role.EMBEDDING:
            excluded.append(module.name)
    if not quantised:
        return None
    declaration = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": quantised,
        "ignore": excluded,
    }
    if model.kv_cache:
        declaration["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return declaration
