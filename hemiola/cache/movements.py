"""What has to be copied between cache pieces, in words: decided by the ledger, carried out by `tensors.CacheTensors`.

Movements are applied in the order in which they were decided. A host copy is named by a number that is used once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CopyState:
    """State slot to state slot: a snapshot is taken or restored."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class SaveState:
    slot: int
    host: int


@dataclass(frozen=True, slots=True)
class LoadState:
    host: int
    slot: int


@dataclass(frozen=True, slots=True)
class SaveBlocks:
    blocks: tuple[int, ...]
    host: int


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    host: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Forget:
    """The host copy is no longer needed."""

    host: int


Movement = CopyState | SaveState | LoadState | SaveBlocks | LoadBlocks | Forget
