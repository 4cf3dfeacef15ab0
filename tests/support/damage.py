"""Checkpoints with something wrong: rewrite one with its tensors changed, or change its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from hemiola.formats.checkpoint import INDEX, Checkpoint
from tests.support.seeded_checkpoint import write_shards


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any], shards: int = 3) -> None:
    """Rewrite the shards after `change` has worked on the tensors, by name, in place."""
    checkpoint = Checkpoint.open(folder)
    tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.headers}
    change(tensors)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    write_shards(folder, tensors, shards)


def change_json(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite a JSON file after `change` has worked on its object in place."""
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


def shard(folder: Path, number: int) -> Path:
    """The file of a shard, counted from 1."""
    (file,) = folder.glob(f"model-{number:05d}-of-*.safetensors")
    return file


def truncate(file: Path, num_bytes: int) -> tuple[int, int]:
    """Cut bytes off the end of a file; its length before and after."""
    before = file.stat().st_size
    with file.open("r+b") as stream:
        stream.truncate(before - num_bytes)
    return before, before - num_bytes


def weight_map(folder: Path) -> dict[str, str]:
    """The index: tensor name -> file name."""
    return dict(json.loads((folder / INDEX).read_text())["weight_map"])
