"""A checkpoint on disk: which file holds which tensor, checked for completeness from headers, read by mapping files.

Knows files and tensors; knows no model and no scheme.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hemiola.errors import CheckpointError
from hemiola.formats.problems import Problems, listed
from hemiola.formats.safetensors import TensorHeader, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Dtypes of more than one byte, whose payloads a file may hold at addresses that they cannot be used at.
_WIDE_DTYPES = {
    **{"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64},
    **{"I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "C64": torch.complex64},
    **{"U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64},
}
_READERS = 16  # of scalars, most of whose time is the disk's
_REMEDY = "Download or copy the checkpoint again, all shards and the index from the same revision."


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The tensors of one folder. `unread_files`: safetensors files in the folder that the index does not name."""

    folder: Path
    headers: Mapping[str, TensorHeader]
    unread_files: tuple[str, ...]
    _handles: Mapping[Path, Any]  # safetensors' mapped file per shard

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Map every shard and read every header; no payload is read.

        The folder holds an index with its shards, or a single safetensors file.

        Raises: CheckpointError naming all that is wrong at once: shards that are missing or truncated (with the bytes
            expected and found, and the tensors lost), tensors that only the index or only a shard knows, tensors in two
            shards.
        """
        folder = Path(folder)
        weight_map = _read_index(folder) if (folder / INDEX).is_file() else None
        names = sorted(set(weight_map.values())) if weight_map is not None else [_find_single(folder).name]
        problems = Problems()
        headers: dict[str, TensorHeader] = {}
        for name in names:
            lost = [tensor for tensor, file in (weight_map or {}).items() if file == name]
            if not (folder / name).is_file():
                problems.add("missing shard", f"{name} with {len(lost)} tensors ({listed(lost)})")
                continue
            found = {header.name: header for header in read_header(folder / name)}
            _check_length(folder / name, found, problems)
            for tensor in sorted(headers.keys() & found.keys()):
                problems.add("tensor in two shards", f"{tensor} in {headers[tensor].file.name} and {name}")
            for tensor in sorted(set(lost) - found.keys()):
                problems.add("tensor in the index but not in its shard", f"{tensor} ({name})")
            if weight_map is not None:
                for tensor in sorted(tensor for tensor in found if weight_map.get(tensor) != name):
                    problems.add("tensor in a shard but not in the index", f"{tensor} ({name})")
            headers |= found
        problems.raise_if_any(folder, _REMEDY)
        unread = {file.name for file in folder.glob("*.safetensors")} - set(names)
        return cls(folder, headers, tuple(sorted(unread)), {folder / name: _map_file(folder / name) for name in names})

    def scalars(self, names: Sequence[str]) -> list[float]:
        """Tensors of one element as numbers, in the order of `names`.

        A large checkpoint has thousands, each on a page of its own: they are read side by side, in the files' order,
        because mapped ones would wait for the disk one by one.

        Raises: KeyError for a name that is not in `headers`.
        """
        order = sorted(range(len(names)), key=lambda i: (self.headers[names[i]].file, self.headers[names[i]].offset))
        values = [0.0] * len(names)

        def read(part: range) -> None:
            for i in part:
                header = self.headers[names[order[i]]]
                dtype = _WIDE_DTYPES.get(header.dtype)
                values[order[i]] = float(self.tensor(header.name) if dtype is None else _read(header, dtype))

        size = -(-len(names) // _READERS) or 1
        with ThreadPoolExecutor(_READERS) as threads:
            list(threads.map(read, (range(at, min(at + size, len(names))) for at in range(0, len(names), size))))
        return values

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold tensors."""
        return tuple(self._handles)

    def tensor(self, name: str) -> Tensor:
        """One tensor on the CPU: a view of the mapped file where its payload is aligned to the element, else a copy.

        Raises: KeyError for a name that is not in `headers`.
        """
        header = self.headers[name]
        dtype = _WIDE_DTYPES.get(header.dtype)
        if dtype is not None and header.offset % dtype.itemsize:
            return _read(header, dtype)
        view: Tensor = self._handles[header.file].get_tensor(name)
        return view


def _read(header: TensorHeader, dtype: torch.dtype) -> Tensor:
    """A copy of a payload, read from the file: pages that are mapped for copying would stay resident beside it."""
    copy = torch.empty(header.shape, dtype=dtype)
    with header.file.open("rb") as stream:
        stream.seek(header.offset)
        stream.readinto(copy.flatten().view(torch.uint8).numpy().data)
    return copy


def _read_index(folder: Path) -> dict[str, str]:
    """weight_map of the index: tensor name -> file name."""
    file = folder / INDEX
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(shard, str) and Path(shard).name == shard for shard in weight_map.values()):
            raise ValueError("weight_map names something that is not a file of this folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            "cannot read the checkpoint's index",
            found=repr(error),
            expected="JSON with a weight_map from tensor to file",
            where=file,
            remedy=_REMEDY,
        ) from error
    return dict(weight_map)


def _find_single(folder: Path) -> Path:
    """The one safetensors file of a folder without an index."""
    if (folder / SINGLE).is_file():
        return folder / SINGLE
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    raise CheckpointError(
        "no index and not one safetensors file" if folder.is_dir() else "no such folder",
        found=listed(file.name for file in files) or None,
        expected=f"{INDEX} with its shards, or {SINGLE}",
        where=folder,
        remedy=_REMEDY,
    )


def _check_length(file: Path, headers: Mapping[str, TensorHeader], problems: Problems) -> None:
    """Note a file that is shorter than its header says, with the tensors whose payload is cut."""
    found = file.stat().st_size
    expected = max((header.offset + header.nbytes for header in headers.values()), default=found)
    if found < expected:
        cut = [header.name for header in headers.values() if header.offset + header.nbytes > found]
        problems.add(
            "truncated shard",
            f"{file.name}, expected {expected} bytes and found {found}, cutting {len(cut)} tensors ({listed(cut)})",
        )


def _map_file(file: Path) -> Any:
    """safetensors' handle on a mapped file; the mapping lives as long as the handle or one of its tensors."""
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError("not a valid safetensors file", found=error, where=file, remedy=_REMEDY) from error
