"""Which of many causes are enough: delta debugging, and then a search for fewer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

MOST_RUNS = 64  # that the search for a smaller set may take


def sufficient(causes: Sequence[str], holds: Callable[[frozenset[str]], bool]) -> tuple[tuple[str, ...], bool]:
    """A set of causes with which `holds` is true, and whether it is known that no smaller one does it.

    `holds` is true of all causes and false of none; each set is tried once. Delta debugging gives a set of which no
    cause can be left out; then all smaller sets are tried, smallest first, as far as MOST_RUNS allows.
    """
    known: dict[frozenset[str], bool] = {}

    def tried(chosen: Sequence[str]) -> bool:
        key = frozenset(chosen)
        if key not in known:
            known[key] = holds(key)
        return known[key]

    found = _minimal(list(causes), tried)
    limit = len(known) + MOST_RUNS
    for size in range(1, len(found)):
        for chosen in combinations(causes, size):
            if len(known) >= limit:
                return tuple(found), False
            if tried(chosen):
                return chosen, True
    return tuple(found), True


def _minimal(causes: list[str], holds: Callable[[Sequence[str]], bool]) -> list[str]:
    """Zeller's ddmin: a set of which no single cause can be left out."""
    parts = 2
    while len(causes) > 1:
        size = -(-len(causes) // parts)
        pieces = [causes[low : low + size] for low in range(0, len(causes), size)]
        rests = [[cause for cause in causes if cause not in piece] for piece in pieces]
        piece = next((piece for piece in pieces if holds(piece)), None)
        rest = None if piece is not None else next((rest for rest in rests if holds(rest)), None)
        if piece is not None:
            causes, parts = piece, 2
        elif rest is not None:
            causes, parts = rest, max(parts - 1, 2)
        elif parts >= len(causes):
            break
        else:
            parts = min(2 * parts, len(causes))
    return causes
