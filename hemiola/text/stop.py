"""Finding stop strings in a stream of text, without letting any part of one out."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Searches a stream for the first of several strings, and withholds what may be the beginning of one.

    The first stop to be complete wins, whatever pieces the text arrives in; of several that end at the same character,
    the longest. Each stop is followed by a Knuth-Morris-Pratt automaton, so that a character costs the same however
    long the stops are.

    hit: the stop string found, or None.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        # Longest first: of two that end at the same character, the longer is met first.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._withheld = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """The part of the stream that is now known to be free of stops, up to the first stop once there is one."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return text
        seen = self._withheld + text
        for end in range(len(self._withheld), len(seen)):
            for i, stop in enumerate(self._stops):
                self._matched[i] = self._advance(i, seen[end])
                if self._matched[i] == len(stop):
                    self.hit = stop
                    self._withheld = ""
                    return seen[: end + 1 - len(stop)]
        num_free = len(seen) - max(self._matched)
        self._withheld = seen[num_free:]
        return seen[:num_free]

    def finish(self) -> str:
        """The withheld text, when nothing follows that could complete a stop."""
        text, self._withheld = self._withheld, ""
        return text

    def _advance(self, i: int, character: str) -> int:
        """How many characters of stop i the stream ends with, after one more character."""
        stop, borders, matched = self._stops[i], self._borders[i], self._matched[i]
        while matched and stop[matched] != character:
            matched = borders[matched - 1]
        return matched + (stop[matched] == character)


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = borders[length - 1]
        length += stop[i] == stop[length]
        borders[i] = length
    return borders
