"""What a checkpoint is, so that an answer can be tied to it: a digest over its tensors, and its configuration."""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from hemiola.config.model import NemotronHConfig
from hemiola.formats.checkpoint import Checkpoint
from hemiola.formats.manifest import Manifest

# What was remarked while reading, and what the stored dtypes decide, which the digest covers.
_NOT_COMPARED = {"warnings", "inert", "quantization"}


@dataclass(frozen=True, slots=True)
class Identity:
    """config: the configuration as the engine understands it, whatever spellings the file has, in JSON's types."""

    checkpoint_sha256: str
    config: Mapping[str, Any]


def identify(manifest: Manifest, config: NemotronHConfig) -> Identity:
    """Reads the whole checkpoint once."""
    return Identity(checkpoint_digest(manifest.checkpoint), config_fields(config))


def checkpoint_digest(checkpoint: Checkpoint) -> str:
    """sha256, hexadecimal, over the name and the payload of every tensor by sorted name: how a checkpoint is cut into
    files, and what else lies beside it, changes nothing."""
    digest = hashlib.sha256()
    for name in sorted(checkpoint.headers):
        digest.update(name.encode())
        digest.update(checkpoint.tensor(name).contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def config_fields(config: NemotronHConfig) -> dict[str, Any]:
    return {f.name: _plain(getattr(config, f.name)) for f in fields(config) if f.name not in _NOT_COMPARED}


def _plain(value: Any) -> Any:
    """A value in JSON's types; infinities, which it lacks, as text."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value
