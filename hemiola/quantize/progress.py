"""How a quantisation tells how far it is."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called with a stage and how much of it is done.

    Stages, in order: "check" (reads every weight that will be quantised; bytes), "calibrate" (tokens), "write" (bytes
    of the source). What it raises ends the quantisation, and nothing is left behind.
    """

    def __call__(self, stage: str, done: int, total: int, /) -> None: ...


def quiet(stage: str, done: int, total: int) -> None:
    """Tells nobody."""
