"""Collects everything wrong with a checkpoint and raises it as one error, so that nobody repairs it file by file."""

from __future__ import annotations

from collections.abc import Iterable

from hemiola.errors import CheckpointError

SHOWN = 20
"""How many items of one kind an error or a report names; the rest is counted."""


def listed(items: Iterable[str], separator: str = ", ") -> str:
    """The first items by name, and how many more there are."""
    items = list(items)
    rest = f"{separator}and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return separator.join(items[:SHOWN]) + rest


class Problems:
    """A growing list of findings, grouped by kind in the order in which the kinds were first met."""

    def __init__(self) -> None:
        self._groups: dict[str, list[str]] = {}

    def add(self, kind: str, item: str) -> None:
        """Note one finding. kind: what is wrong, in the singular or plural-neutral form; item: where, and details."""
        self._groups.setdefault(kind, []).append(item)

    def raise_if_any(self, where: object, remedy: str) -> None:
        """Raises: CheckpointError holding every finding, each kind with its count and its first items by name."""
        if self._groups:
            text = "; ".join(f"{kind} ({len(items)}): {listed(items)}" for kind, items in self._groups.items())
            raise CheckpointError(text, where=where, remedy=remedy)
