"""Spans of time on the machine's monotonic clock, and the window of decode steps that figures may be taken from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hemiola.errors import HemiolaError


class WindowError(HemiolaError):
    """There is no figure: what it would be of is empty, negative, or not decoding alone."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a run, in seconds of `time.monotonic`. phase: "load", "prefill", "decode"."""

    phase: str
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def check_window(window: Span, others: Iterable[Span]) -> None:
    """Raises: WindowError for a window that is empty, ends before it begins, or overlaps another part of the run."""
    if not window.seconds > 0:
        kind = "empty" if window.seconds == 0 else "negative"
        raise WindowError(f"the {window.phase} window is {kind}", found=f"{window.seconds:.4g} s", expected="> 0 s")
    for other in others:
        overlap = min(window.end_s, other.end_s) - max(window.start_s, other.start_s)
        if overlap > 0:
            raise WindowError(
                f"the {window.phase} window overlaps {other.phase}",
                found=f"{overlap:.4g} of {window.seconds:.4g} s",
                expected="none of it",
            )
