"""Checkpoints that have the headers and the length of public ones but no weights: sparse files, kilobytes on disk.

Geometry and scheme maps are those of the public NVFP4 exports of the 30B models. Scalar scales hold 1.0.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from hemiola.config.model import LayerKind, NemotronHConfig
from hemiola.formats.layout import Module, Role, expected_modules
from hemiola.formats.safetensors import ITEM_BYTES
from tests.support.seeded_checkpoint import mixed_precision
from tests.support.tiny_checkpoint import algorithm_of
from tests.support.variants import public

Header = tuple[str, str, tuple[int, ...]]  # name, dtype, shape
_SHARDS = 5


def _stored(module: Module, algorithm: str | None) -> Iterator[Header]:
    """The headers of one module in a public export."""
    name, shape = module.name, module.shape
    if algorithm is None:
        yield module.tensor_name, "F32" if module.role is Role.ROUTER else "BF16", shape
        return
    if algorithm == "FP8":
        yield f"{name}.weight", "F8_E4M3", shape
        yield f"{name}.weight_scale", "F32", ()
    else:
        yield f"{name}.weight", "U8", (shape[0], shape[1] // 2)
        yield f"{name}.weight_scale", "F8_E4M3", (shape[0], shape[1] // 16)
        yield f"{name}.weight_scale_2", "F32", ()
    if algorithm != "W4A16_NVFP4":
        yield f"{name}.input_scale", "F32", ()


def _mtp(config: NemotronHConfig) -> Iterator[Header]:
    """The draft head: the attention and MoE layers of a `*E` model under other names, and five vectors and a matrix."""
    hidden = config.hidden_size
    for name, shape in {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden)}.items():
        yield f"mtp.layers.0.{name}.weight", "BF16", shape
    yield "mtp.layers.1.final_layernorm.weight", "BF16", (hidden,)
    places = {config.layers.index(LayerKind.ATTENTION): 0, config.layers.index(LayerKind.MOE): 1}
    for module in expected_modules(config):
        if module.layer in places:
            name = module.tensor_name.replace(f"backbone.layers.{module.layer}.", f"mtp.layers.{places[module.layer]}.")
            yield name, "F32" if name.endswith("correction_bias") else "BF16", module.shape


def write_headers(folder: Path, headers: Iterable[Header], shards: int = _SHARDS) -> None:
    """Write sparse shards with an index; every F32 tensor of one element holds 1.0, all else zeros."""
    headers = list(headers)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        entries, scalars, end = {}, [], 0
        for name, dtype, shape in headers[shard::shards]:
            begin, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
            scalars += [begin] if dtype == "F32" and math.prod(shape) == 1 else []
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            stream.truncate(8 + len(text) + end)
            for begin in scalars:
                stream.seek(8 + len(text) + begin)
                stream.write(struct.pack("<f", 1.0))
        weight_map |= dict.fromkeys(entries, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_lightning(folder: Path) -> None:
    """3.5-Lightning-30B-A3B-NVFP4: MIXED_PRECISION in config.json, FP8 KV scales, 270 tensors of the draft head."""
    folder.mkdir(parents=True)
    raw = public("lightning-30b-a3b")
    config = NemotronHConfig.from_dict(raw)
    headers: list[Header] = []
    algorithms: dict[str, str] = {}
    for module in expected_modules(config):
        algorithm = algorithm_of(module, "lightning")
        algorithms |= {module.name: algorithm} if algorithm else {}
        headers += _stored(module, algorithm)
    for layer in config.indices(LayerKind.ATTENTION):
        headers += [(f"backbone.layers.{layer}.mixer.{x}_proj.{x}_scale", "F32", (1,)) for x in "kv"]
    write_headers(folder, [*headers, *_mtp(config)])
    exclusions = [f"backbone.layers.{layer}.mixer.conv1d" for layer in config.indices(LayerKind.MAMBA)]
    exclusions += [f"backbone.layers.{layer}.mixer" for layer in config.indices(LayerKind.ATTENTION)]
    raw["quantization_config"] = mixed_precision(algorithms, [*exclusions, "mtp*"])
    raw["quantization_config"]["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    (folder / "config.json").write_text(json.dumps(raw))


def write_nano_nvfp4(folder: Path) -> None:
    """Nano-3 30B-A3B-NVFP4: NVFP4 with exclusions in hf_quant_config.json, FP8 KV asked for but without scales."""
    folder.mkdir(parents=True)
    raw = public("nano-3-30b-a3b")
    config = NemotronHConfig.from_dict(raw)
    attention = config.indices(LayerKind.ATTENTION)
    plain_mamba = [layer - 1 for layer in attention]
    headers: list[Header] = []
    for module in expected_modules(config):
        is_excluded = module.role is Role.MAMBA and module.layer in plain_mamba
        headers += _stored(module, None if is_excluded else algorithm_of(module, "nvfp4"))
    write_headers(folder, headers)
    exclusions = [f"backbone.layers.{layer}.mixer.{x}_proj" for layer in attention for x in "qkvo"]
    exclusions += [f"backbone.layers.{layer}.mixer.{x}_proj" for layer in plain_mamba for x in ("in", "out")]
    exclusions += [f"backbone.layers.{layer}.mixer.conv1d" for layer in config.indices(LayerKind.MAMBA)]
    quantization = {
        "quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head", *exclusions],
    }
    document = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": quantization}
    (folder / "hf_quant_config.json").write_text(json.dumps(document))
    (folder / "config.json").write_text(json.dumps(raw))
