"""Which gate records a speed rests on.

A gate counts for a measurement when it is of the same commit with a clean tree (where there is no repository: of the
same sources to the byte), ran on the same device model, with an engine that agrees in every field of SAME, compared in
decoding and in prefill, and passed. One on the measured
checkpoint itself settles it. Weights that are drawn have no golden of their own: there, gates on other checkpoints
count together when their linears cover what the measured model stores, role by role (and KV scales, where the cache is
FP8). The kernels, roundings and formats are proven then, not the measured shapes, and `Gating.describe` says so. The
latest gate of a checkpoint is the one that counts: where it is red, nothing that it would cover is gated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hemiola.evidence.gate import Verdict
from hemiola.evidence.records import Chain, Claim, Mark, Record

SAME = (
    *("arms", "dtype", "kv_dtype", "router_dtype", "invariant", "strict", "cuda_graphs", "overlap", "block_size"),
    "prefix_caching",
)
_GREEN = {Verdict.STRICT_PASS.value, Verdict.NOISE_PASS.value}
_MODES = {"decode", "prefill"}


@dataclass(frozen=True, slots=True)
class Gating:
    """by: the gate records that a measurement rests on; none where it is not gated, and `why_not`."""

    by: Sequence[Record]
    is_own: bool = False
    why_not: str = ""

    @property
    def ids(self) -> list[str]:
        return [record.id for record in self.by]

    @property
    def marks(self) -> dict[str, str]:
        return {} if self.by else {Mark.UNGATED.value: self.why_not}

    def describe(self) -> str:
        if not self.by:
            return f"{Mark.UNGATED}: {self.why_not}"
        gates = "; ".join(f"{r.id} ({r.claim.verdict}) on {r.claim.model['name']}" for r in self.by)
        which = "this checkpoint" if self.is_own else "other shapes, every format of its linears covered"
        return f"gated by {gates}: {which}"


def find_gates(
    chain: Chain | None,
    source: Mapping[str, Any],
    model: Mapping[str, Any],
    engine: Mapping[str, Any],
    machine: Mapping[str, Any],
) -> Gating:
    """The gates among verified records that a measurement of these facts rests on. chain: None where no records are
    given. See `Claim` for the mappings."""
    if chain is None:
        return Gating((), why_not="no folder of records was given to look for a gate")
    if source["is_dirty"]:
        return Gating((), why_not="the tree is dirty, a gate is of one commit")
    latest: dict[Any, Record] = {}
    reasons: Counter[str] = Counter()
    for record in chain.verified:
        if record.claim.kind != "gate":
            continue
        if reason := _other(record.claim, source, engine, machine):
            reasons[reason] += 1
        else:
            latest[record.claim.model["checkpoint_sha256"]] = record
    if not latest:
        told = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        return Gating((), why_not="no gate record of this commit and engine" + (f" ({told})" if told else ""))
    own = latest.get(model["checkpoint_sha256"]) if model["checkpoint_sha256"] else None
    if own is not None:
        red = own.claim.verdict not in _GREEN
        return Gating((), why_not=f"its gate {own.id} is red ({own.claim.verdict})") if red else Gating([own], True)
    if model["checkpoint_sha256"]:
        return Gating((), why_not="no gate record of this checkpoint")
    return _covering(list(latest.values()), model, engine)


def _covering(gates: Sequence[Record], model: Mapping[str, Any], engine: Mapping[str, Any]) -> Gating:
    wanted = _formats(model, engine)
    used: list[Record] = []
    covered: set[str] = set()
    for record in gates:
        offered = _formats(record.claim.model, engine) & wanted
        if not offered:
            continue
        if record.claim.verdict not in _GREEN:
            return Gating((), why_not=f"gate {record.id} on {record.claim.model['name']} is red")
        if offered - covered:
            used.append(record)
            covered |= offered
    if missing := sorted(wanted - covered):
        return Gating((), why_not=f"no green gate covers {', '.join(missing)}")
    return Gating(used)


def _formats(model: Mapping[str, Any], engine: Mapping[str, Any]) -> set[str]:
    return {*model["stored"], *(["KV scales"] if engine["kv_dtype"] == "fp8" and model["has_kv_scales"] else [])}


def _other(claim: Claim, source: Mapping[str, Any], engine: Mapping[str, Any], machine: Mapping[str, Any]) -> str:
    """Why a gate is one of something else, as what one or more gates are; "" where it is not."""
    if None in (claim.source["commit"], source["commit"]):
        if claim.source["sha256"] != source["sha256"]:
            return "of other sources"
    elif claim.source["commit"] != source["commit"]:
        return "of another commit"
    if claim.source["is_dirty"]:
        return "of a dirty tree"
    if claim.machine["device"] != machine["device"]:
        return f"on {claim.machine['device']}"
    for name in SAME:
        if claim.engine.get(name) != engine.get(name):
            theirs, ours = claim.engine.get(name), engine.get(name)
            if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
                changed = sorted(k for k in {*theirs, *ours} if theirs.get(k) != ours.get(k))
                return f"with other arms ({', '.join(changed[:3])}{', ...' if len(changed) > 3 else ''})"
            return f"with {name} {theirs}, not {ours}"
    if not set(claim.workload.get("modes", ())) >= _MODES:
        return f"without {' and '.join(sorted(_MODES - set(claim.workload.get('modes', ()))))}"
    return ""
