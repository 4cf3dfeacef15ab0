"""Which arms a run took, from the op table's counters, held to what was asked for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hemiola.config.engine import OTHERS
from hemiola.evidence.golden import EvidenceError
from hemiola.llm import LLM
from hemiola.ops import Path

Arms = str | Mapping[str, str]
Counts = dict[Path, int]


@contextmanager
def counted(llm: LLM) -> Iterator[Counts]:
    """Gives the calls made inside, once it is left."""
    before, calls = llm.path_counts(), Counts()
    yield calls
    for path, count in llm.path_counts().items():
        if added := count - before.get(path, 0):
            calls[path] = added


def check_paths(counts: Counts, arms: Arms) -> None:
    """arms: as EngineConfig has them; "auto" is any one arm.

    Raises: EvidenceError when nothing was counted, a call fell back, or one ran on another arm than asked.
    """
    if not counts:
        raise EvidenceError("no path is proven", found="no counted call", expected="the calls of the run")
    if fallen := [f"{path.op}: {calls} calls ({path.reason})" for path, calls in counts.items() if path.reason]:
        raise EvidenceError("a path fell back to another arm", found="; ".join(fallen), expected="none")
    any_arm = next(iter(counts)).arm
    strays = [
        f"{path.op} on the {path.arm} arm: {calls} calls"
        for path, calls in counts.items()
        if path.arm != _asked(arms, path.op, any_arm)
    ]
    if strays:
        raise EvidenceError("a path ran on another arm than asked", found="; ".join(strays), expected=f"arms={arms}")


def _asked(arms: Arms, op: str, any_arm: str) -> str:
    if isinstance(arms, str):
        return any_arm if arms == "auto" else arms
    return arms.get(op, arms.get(OTHERS, "reference"))


def describe_paths(counts: Counts) -> str:
    """The calls and ops of both arms; the reference arm is named also where nothing ran on it."""
    calls: Counter[str] = Counter({"reference": 0})
    ops: defaultdict[str, set[str]] = defaultdict(set)
    for path, count in counts.items():
        calls[path.arm] += count
        ops[path.arm].add(path.op)
    return "; ".join(f"{arm} arm: {len(ops[arm])} ops, {count:,} calls" for arm, count in sorted(calls.items()))
