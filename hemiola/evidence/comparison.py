"""Which two records may be compared at all, and the ratio of two figures of such a pair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hemiola.evidence.records import Claim, Figure, Mark, Record

CLOCK_TOLERANCE = 0.05  # of the larger one of two clocks: less is the same state


@dataclass(frozen=True, slots=True)
class Ratio:
    """One figure of two records that may be compared."""

    before: Figure
    after: Figure

    def line(self) -> str:
        old, new = self.before.value or 0.0, self.after.value or 0.0
        told = f"{self.after.name}: {new / old:.3f} times ({old:.4g} -> {new:.4g} {self.after.unit})"
        return f"{told}, spreads overlap" if self.overlaps else told

    @property
    def overlaps(self) -> bool:
        """Whether the spreads of both sides have a value in common: then it is no difference that was shown."""
        lows, highs = ([f.low for f in (self.before, self.after)], [f.high for f in (self.before, self.after)])
        return max(low or 0.0 for low in lows) <= min(high or 0.0 for high in highs)


def why_not(one: Claim, other: Claim) -> str:
    """The first reason not to compare two claims: "hardware differs: A, B", say; "" where there is none."""
    for mark in (Mark.VOID, Mark.PENDING):
        if any(mark in claim.marks for claim in (one, other)):
            return f"a side is {mark}"
    devices = [claim.machine.get("device") for claim in (one, other)]
    if None in devices:
        return "hardware is not stated"
    if devices[0] != devices[1]:
        return f"hardware differs: {devices[0]}, {devices[1]}"
    if difference := _clocks(one, other):
        return f"clock state {difference}"
    cache, other_cache = (claim.workload.get("cache") for claim in (one, other))
    if cache is None or other_cache is None:
        return "cache state is not known"
    if difference := _differing(cache, other_cache):
        return f"cache state differs: {difference}"
    if difference := _differing(_workload(one), _workload(other)):
        return f"workload differs: {difference}"
    return ""


def ratios(before: Record, after: Record) -> list[Ratio]:
    """Of the figures that both have, by name and unit. Nothing where the records may not be compared."""
    if why_not(before.claim, after.claim):
        return []
    known = {(f.name, f.unit): f for f in before.claim.figures if is_compared(f)}
    pairs = ((known.get((f.name, f.unit)), f) for f in after.claim.figures if is_compared(f))
    return [Ratio(old, new) for old, new in pairs if old is not None]


def is_compared(figure: Figure) -> bool:
    """A time or a rate is, where it was repeated; of a single measurement, a fraction or a count no ratio is made."""
    is_speed = figure.unit in ("s", "ms", "us") or figure.unit.endswith("/s")
    return is_speed and bool(figure.value) and figure.n > 1 and figure.low is not None and figure.high is not None


def compare(before: Record, after: Record) -> list[str]:
    """The ratios as lines, each with what differs between the two engines, or one line that says what was declined."""
    if reason := why_not(before.claim, after.claim):
        cell = after.claim.workload.get("cell", after.claim.kind)
        return [f"declined, {cell} against {before.id}: {reason}"]
    is_ungated = any(Mark.UNGATED in record.claim.marks for record in (before, after))
    start = f"{f'{Mark.UNGATED} ' if is_ungated else ''}against {before.id} ({_changed(before.claim, after.claim)})"
    return [f"{start}, {ratio.line()}" for ratio in ratios(before, after)]


def _changed(one: Claim, other: Claim) -> str:
    """What ran, the engine, an op whose arm differs by itself, and the versions beside them."""
    sides = []
    for claim in (one, other):
        arms = {f"{op} on": arm for op, arm in claim.engine.get("arms", {}).items()}
        engine = {name: value for name, value in claim.engine.items() if name != "arms"}
        versions = {name: value for name, value in (claim.machine.get("versions") or {}).items() if name != "commit"}
        sides.append({"code": claim.code, **arms, **engine, "driver": claim.machine.get("driver"), **versions})
    old, new = sides
    changed = [f"{name} {old.get(name)} -> {new.get(name)}" for name in new | old if old.get(name) != new.get(name)]
    return "; ".join(changed) or "the same engine"


def _clocks(one: Claim, other: Claim) -> str:
    if any(Mark.UNSTEADY in claim.marks for claim in (one, other)):
        return "is unsteady"
    first, second = ((claim.machine.get("clock_mhz") or {}).get("median") for claim in (one, other))
    if (first is None) != (second is None):
        return "differs: read in one alone"
    if first is not None and second is not None and abs(first - second) > CLOCK_TOLERANCE * max(first, second):
        return f"differs: {first:.0f} MHz, {second:.0f} MHz"
    return ""


def _workload(claim: Claim) -> dict[str, Any]:
    """What the machine had to do, the model included: its configuration and how it is stored, not its weights."""
    asked = {name: value for name, value in claim.workload.items() if name != "cache"}
    of_model = {name: claim.model.get(name) for name in ("config_sha256", "stored")}
    if of_model["config_sha256"] is None:
        of_model = {"name": claim.model.get("name")}
    return {"kind": claim.kind, **asked, **{f"model {name}": value for name, value in of_model.items()}}


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    names = [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
    return "; ".join(f"{name} {one.get(name)}, {other.get(name)}" for name in names[:3])
