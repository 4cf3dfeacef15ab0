"""Which gate records a speed rests on.

A gate counts for a measurement when it is of the same commit with a clean tree (where there is no repository: of the
same sources to the byte), ran on the same device model with the same driver and the versions of VERSIONS, with an
engine that agrees in every field of SAME. A red one always does; a green one when it compared MIN_POSITIONS in decoding
and in prefill each. Of the gates of a checkpoint by one golden the latest counts; where one of them is red, nothing
that it would cover is gated.

A gate of the measured checkpoint itself settles it. Weights that are drawn have no golden of their own: there, gates
on other checkpoints count together when their linears cover what the measured model stores, role by role (and KV
scales, where the cache is FP8). The kernels, roundings and formats are proven then, not the measured shapes, and
`Gating.describe` says so. In either case the gates have to have run every op on the arm and in the variant that the
measurement took, and no call of it may have fallen back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hemiola.evidence.compare import MODES
from hemiola.evidence.gate import Verdict
from hemiola.evidence.records import Chain, Claim, Mark, Record

SAME = (
    *("arms", "dtype", "kv_dtype", "router_dtype", "invariant", "strict", "cuda_graphs", "overlap", "block_size"),
    "prefix_caching",
)
_GREEN = {Verdict.STRICT_PASS.value, Verdict.NOISE_PASS.value}
VERSIONS = ("torch", "triton")
MIN_POSITIONS = 100  # of each mode that a green gate has compared: fewer show little


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
    paths: Sequence[Mapping[str, Any]],
) -> Gating:
    """The gates among verified records that a measurement of these facts rests on. chain: None where no records are
    given. See `Claim` for the rest."""
    if chain is None:
        return Gating((), why_not="no folder of records was given to look for a gate")
    if source["is_dirty"]:
        return Gating((), why_not="the tree is dirty, a gate is of one commit")
    if not paths:
        return Gating((), why_not="no call was counted")
    if fallen := sorted({f"{path['op']} ({path['reason']})" for path in paths if path["reason"]}):
        return Gating((), why_not=f"calls fell back to another arm: {'; '.join(fallen)}")
    latest: dict[tuple[Any, Any], Record] = {}
    reasons: Counter[str] = Counter()
    for record in chain.verified:
        if record.claim.kind != "gate":
            continue
        if reason := _other(record.claim, source, engine, machine) or (
            "" if _is_red(record.claim) else too_few(record.claim.workload.get("positions", {}))
        ):
            reasons[reason] += 1
        else:
            latest[record.claim.model["checkpoint_sha256"], record.claim.workload.get("golden_sha256")] = record
    if not latest:
        told = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        return Gating((), why_not="no gate record of this commit and engine" + (f" ({told})" if told else ""))
    gates = list(latest.values())
    if model["checkpoint_sha256"]:
        return _own([r for r in gates if r.claim.model["checkpoint_sha256"] == model["checkpoint_sha256"]], paths)
    return _covering(gates, model, engine, paths)


def too_few(positions: Mapping[str, int]) -> str:
    """Why a green gate that compared so many positions of each mode counts for nothing; "" where it counts."""
    short = [f"{positions.get(mode, 0)} in {mode}" for mode in MODES if positions.get(mode, 0) < MIN_POSITIONS]
    return f"with fewer than {MIN_POSITIONS} positions ({', '.join(short)})" if short else ""


def _own(gates: Sequence[Record], paths: Iterable[Mapping[str, Any]]) -> Gating:
    if not gates:
        return Gating((), why_not="no gate record of this checkpoint")
    for record in gates:
        if _is_red(record.claim):
            return Gating((), why_not=f"its gate {record.id} is red ({record.claim.verdict})")
    ran = {path for record in gates for path in _paths(record.claim.paths)}
    if missing := sorted(_paths(paths) - ran):
        return Gating((), why_not=f"its gate did not run {', '.join(missing)}")
    return Gating(gates, True)


def _covering(
    gates: Sequence[Record], model: Mapping[str, Any], engine: Mapping[str, Any], paths: Iterable[Mapping[str, Any]]
) -> Gating:
    formats = _formats(model, engine)
    wanted = formats | _paths(paths)
    used: list[Record] = []
    covered: set[str] = set()
    for record in gates:
        offered = _formats(record.claim.model, engine) & formats
        if not offered:
            continue
        if _is_red(record.claim):
            return Gating((), why_not=f"gate {record.id} on {record.claim.model['name']} is red")
        offered |= _paths(record.claim.paths) & wanted
        if offered - covered:
            used.append(record)
            covered |= offered
    if missing := sorted(wanted - covered):
        return Gating((), why_not=f"no green gate covers {', '.join(missing)}")
    return Gating(used)


def _is_red(claim: Claim) -> bool:
    return claim.verdict not in _GREEN


def _paths(paths: Iterable[Mapping[str, Any]]) -> set[str]:
    return {f"{path['op']} on the {path['arm']} arm as {path['variant']}" for path in paths}


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
    for name, theirs, ours in (
        ("driver", claim.machine.get("driver"), machine.get("driver")),
        *((name, *(of.get("versions", {}).get(name) for of in (claim.machine, machine))) for name in VERSIONS),
    ):
        if theirs != ours:
            return f"with {name} {theirs}, not {ours}"
    for name in SAME:
        if claim.engine.get(name) != engine.get(name):
            theirs, ours = claim.engine.get(name), engine.get(name)
            if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
                changed = sorted(k for k in {*theirs, *ours} if theirs.get(k) != ours.get(k))
                return f"with other arms ({', '.join(changed[:3])}{', ...' if len(changed) > 3 else ''})"
            return f"with {name} {theirs}, not {ours}"
    return ""
