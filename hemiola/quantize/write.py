"""Writes the quantised checkpoint: one source tensor at a time, into a folder that appears whole or not at all.

Each source shard becomes a shard of the same name; its tensors are read as views of the mapped file, large weights are
encoded a few rows at a time, and every piece goes straight to its place in the file. The index is written last.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hemiola.errors import CheckpointError
from hemiola.formats.checkpoint import INDEX
from hemiola.formats.declaration import SECOND_FILE, Algorithm
from hemiola.formats.layout import MTP_ROOT, Module, canonical
from hemiola.formats.manifest import Manifest
from hemiola.formats.quant import fp8, nvfp4
from hemiola.formats.safetensors import ITEM_BYTES
from hemiola.quantize.plan import QuantPlan, StoredTensor
from hemiola.quantize.progress import Progress
from hemiola.quantize.scales import ActivationScales

_PARTIAL_SUFFIX = ".hemiola-partial"
_PIECE_ELEMENTS = 1 << 22  # of a weight, encoded at once
_TORCH_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
_WEIGHT_FILES = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf")
_REWRITTEN = ("config.json", SECOND_FILE)


def refuse_occupied(target: Path) -> None:
    """Raises: CheckpointError when `target` exists and is not an empty folder."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(
            "the destination exists",
            found="a folder with files in it" if target.is_dir() else "a file",
            expected="a name that is free, or an empty folder",
            where=target,
            remedy="Choose another destination, or remove this one.",
        )


@contextmanager
def appearing_whole(target: Path) -> Iterator[Path]:
    """A new folder beside `target`, renamed to `target` when the block ends well and removed when it does not.

    One that a killed run left behind is replaced. `target` is free, or an empty folder.
    """
    partial = target.with_name(target.name + _PARTIAL_SUFFIX)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class ShardWriter:
    """One safetensors file, whose tensors are known beforehand and arrive in pieces, in any order of tensors."""

    def __init__(self, file: Path, tensors: Sequence[StoredTensor]) -> None:
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._next: dict[str, int] = {}  # where the next piece of a tensor goes
        self._end: dict[str, int] = {}
        end = 0
        # Wide elements first, so that every payload is aligned to its element and can be read in place.
        for name, dtype, shape in sorted(tensors, key=lambda tensor: (-ITEM_BYTES[tensor.dtype], tensor.name)):
            begin, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
            self._next[name], self._end[name] = begin, end
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        self._payload = 8 + len(header)
        self._stream = file.open("wb")
        self._stream.write(struct.pack("<Q", len(header)) + header)

    def write(self, name: str, piece: Tensor) -> None:
        """Append to a tensor; `piece` is already of its dtype."""
        raw = piece.contiguous().reshape(-1).view(torch.uint8).numpy()
        self._stream.seek(self._payload + self._next[name])
        self._stream.write(raw.data)
        self._next[name] += raw.nbytes

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stream.close()
        assert kind is not None or self._next == self._end, "a tensor was not written whole"


@dataclass(slots=True)
class Tally:
    """What the encoding did to the weights, per algorithm: sums of squares of the values and of their errors."""

    signal: dict[Algorithm, float] = field(default_factory=lambda: defaultdict(float))
    error: dict[Algorithm, float] = field(default_factory=lambda: defaultdict(float))
    num_bytes: int = 0

    def relative_rms(self) -> dict[str, float]:
        """Root of the mean squared error over the root of the mean square; 0 for weights that are all zero."""
        return {a.value: (self.error[a] / signal) ** 0.5 if signal else 0.0 for a, signal in self.signal.items()}


class Writer:
    """Writes one plan's checkpoint into a folder. weight_scales: by module name, for the encoding of NVFP4 chosen."""

    def __init__(
        self,
        manifest: Manifest,
        plan: QuantPlan,
        weight_scales: Mapping[str, float],
        activations: ActivationScales,
        four_over_six: bool,
    ) -> None:
        self.source, self.plan = manifest.checkpoint, plan
        self.weight_scales, self.activations = weight_scales, activations
        self.encode_nvfp4 = nvfp4.encode_four_over_six if four_over_six else nvfp4.encode
        self.has_mtp = manifest.num_mtp_tensors > 0

    def write(self, folder: Path, progress: Progress) -> Tally:
        """Weights, then the other files, then the index."""
        shards: dict[str, list[str]] = {}
        for name, header in self.source.headers.items():
            if canonical(name) in self.plan.modules or name.startswith(MTP_ROOT):
                shards.setdefault(header.file.name, []).append(name)
        total = sum(self.source.headers[name].nbytes for names in shards.values() for name in names)
        weight_map: dict[str, str] = {}
        tally, done = Tally(), 0
        progress("write", 0, total)
        for file, names in shards.items():
            outputs = {name: self._outputs(name) for name in names}
            tensors = [tensor for group in outputs.values() for tensor in group]
            weight_map |= dict.fromkeys((tensor.name for tensor in tensors), file)
            tally.num_bytes += sum(math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype] for tensor in tensors)
            with ShardWriter(folder / file, tensors) as shard:
                for name in names:
                    self._convert(name, outputs[name], shard, tally)
                    done += self.source.headers[name].nbytes
                    progress("write", done, total)
        self._copy_other_files(folder)
        self._write_json(folder)
        if (self.source.folder / INDEX).is_file():
            index = {"metadata": {"total_size": tally.num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            _dump(index, folder / INDEX)
        return tally

    def _outputs(self, name: str) -> list[StoredTensor]:
        """What a source tensor becomes, its own successor first."""
        if name.startswith(MTP_ROOT):
            header = self.source.headers[name]
            return [StoredTensor(name, header.dtype, header.shape)]
        return self.plan.tensors(canonical(name))

    def _convert(self, name: str, outputs: list[StoredTensor], shard: ShardWriter, tally: Tally) -> None:
        tensor, (first, *companions) = self.source.tensor(name), outputs
        module = self.plan.modules.get(canonical(name))
        if module is None:
            shard.write(name, tensor)
        elif self.plan.algorithms[module.name] is Algorithm.PLAIN:
            shard.write(first.name, tensor.to(_TORCH_DTYPES[first.dtype]))
        else:
            self._encode(module, tensor, shard, tally)
        for companion in companions:
            value = self._scalar(companion.name)
            if value is not None:
                shard.write(companion.name, torch.tensor(value))

    def _scalar(self, name: str) -> float | None:
        """Value of a scalar scale, by tensor name; None for block scales."""
        module, _, kind = name.rpartition(".")
        if kind == "input_scale":
            return self.activations.inputs[module]
        if kind in ("k_scale", "v_scale"):
            return self.activations.kv[name]
        is_fp8 = self.plan.algorithms[module] is Algorithm.FP8
        return self.weight_scales[module] if kind == ("weight_scale" if is_fp8 else "weight_scale_2") else None

    def _encode(self, module: Module, weight: Tensor, shard: ShardWriter, tally: Tally) -> None:
        """The codes and block scales of a weight, some rows at a time."""
        algorithm, scale = self.plan.algorithms[module.name], self.weight_scales[module.name]
        for rows in weight.split(max(1, _PIECE_ELEMENTS // weight.shape[1])):
            values = rows.float()
            if algorithm is Algorithm.FP8:
                codes = fp8.quantize(values, scale)
                decoded = fp8.dequantize(codes, scale)
            else:
                codes, block_scale, _ = self.encode_nvfp4(values, scale)
                decoded = nvfp4.decode(codes, block_scale, scale)
                shard.write(f"{module.name}.weight_scale", block_scale)
            shard.write(f"{module.name}.weight", codes)
            tally.signal[algorithm] += float(values.square().sum(dtype=torch.float64))
            tally.error[algorithm] += float((decoded - values).square().sum(dtype=torch.float64))

    def _copy_other_files(self, folder: Path) -> None:
        """Tokenizer, generation config, chat template, model card: every file that is not rewritten or a weight."""
        for file in sorted(self.source.folder.iterdir()):
            if file.is_file() and not file.name.endswith(_WEIGHT_FILES) and file.name not in _REWRITTEN:
                shutil.copyfile(file, folder / file.name)

    def _write_json(self, folder: Path) -> None:
        """config.json with the source's keys, and the declaration where the scheme has it."""
        config = json.loads((self.source.folder / "config.json").read_text(encoding="utf-8"))
        # A float32 source has become BF16 with the rest.
        config |= {key: "bfloat16" for key in ("dtype", "torch_dtype") if config.get(key) is not None}
        declaration = self.plan.declaration(self.has_mtp)
        if self.plan.scheme == "lightning":
            config["quantization_config"] = declaration
        else:
            _dump(declaration, folder / SECOND_FILE)
        _dump(config, folder / "config.json")


def _dump(document: object, file: Path) -> None:
    file.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
