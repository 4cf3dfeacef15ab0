"""Records: claims as lines of JSON in a folder of the user's choosing, each tied to the one before it by a hash.

The folder has one file, FILE, to which lines are added and in which none is changed. A line is an object with sorted
keys: `format`, `date`, `previous_sha256` (of the line before, as its bytes are, without the line break; 64 zeros in the
first line), the fields of Claim, and `sha256` of the line without this key. So a line that was changed, removed, moved
or put in between is found. Lines that are missing at the end are not, nor is a file that was written anew as a whole:
whoever wants to tell writes down `Chain.head` elsewhere.
"""

from __future__ import annotations

import enum
import fcntl
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hemiola.evidence.golden import EvidenceError

FILE = "records.jsonl"
FORMAT = 1
START = "0" * 64
SPEEDS = ("bench", "legs", "load")  # kinds whose figures mean nothing when the tokens are wrong
_ID_DIGITS = 12


class Mark(enum.StrEnum):
    """What is to be said before any of a claim's figures."""

    UNGATED = "UNGATED"  # no verdict on the tokens of what was measured
    VOID = "VOID"  # it does not hold: what it says was measured did not run
    PENDING = "PENDING"  # announced, not measured yet
    UNSTEADY = "UNSTEADY"  # the machine changed its state meanwhile


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with its unit. n: samples that it is the median of, unless its name says otherwise; low, high: the
    least and the largest of them. value: None where there is none, and `why`. Raises: EvidenceError without either."""

    name: str
    value: float | None
    unit: str
    n: int = 1
    low: float | None = None
    high: float | None = None
    why: str = ""

    def __post_init__(self) -> None:
        if self.value is None and not self.why:
            raise EvidenceError("a figure without a value", expected="a number, or why there is none", where=self.name)


@dataclass(frozen=True, slots=True)
class Claim:
    """What one line says.

    kind: "gate", "bench", "legs", "trace", "load" or another word. run: the command, word by word.
    source: `commit` and `is_dirty`, null where there is no repository, and `sha256` of the package's sources.
    model, engine: see `hemiola.evidence.facts`. machine: `device` (its name), `driver`, `versions`, and `clock_mhz`
        (start, min, median, max over the measurement) where it was read.
    workload: what was run, so that only like is compared with like; `cache` in it is what was cached before.
    paths: op, arm, variant, reason and calls. verdict: of a gate; of legs, how they differ. gated_by: ids of the gate
    records that a speed rests on. marks: each with its reason. more: whatever else, in JSON's types.

    Raises: EvidenceError for a speed that neither rests on a gate nor has a mark that says so, and an unknown mark.
    """

    kind: str
    run: Sequence[str]
    source: Mapping[str, Any]
    model: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    workload: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    paths: Sequence[Mapping[str, Any]] = ()
    verdict: str = ""
    gated_by: Sequence[str] = ()
    marks: Mapping[str, str] = field(default_factory=dict)
    figures: Sequence[Figure] = ()
    more: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if unknown := set(self.marks) - set(Mark):
            raise EvidenceError("unknown marks", found=sorted(unknown), expected=f"of {', '.join(Mark)}", where="marks")
        excused = {Mark.UNGATED, Mark.VOID, Mark.PENDING} & set(self.marks)
        if self.kind in SPEEDS and not self.gated_by and not excused:
            raise EvidenceError(
                "a speed without a verdict on its tokens",
                found="no gate record",
                expected="gated_by, or a mark: UNGATED, VOID, PENDING",
                where=self.kind,
            )

    @property
    def code(self) -> str:
        """What ran, in a few letters: a commit, or a digest of sources."""
        if self.source.get("commit") is None:
            return f"sources {str(self.source.get('sha256'))[:10]}"
        return str(self.source["commit"])[:10] + (", dirty" if self.source.get("is_dirty") else "")


@dataclass(frozen=True, slots=True)
class Record:
    """A line that was read or written, the first being number 1. sha256: of the whole line, as the next one has it."""

    number: int
    date: str
    previous_sha256: str
    sha256: str
    claim: Claim

    @property
    def id(self) -> str:
        return self.sha256[:_ID_DIGITS]


@dataclass(frozen=True, slots=True)
class Chain:
    """records: the lines that could be read, in order. broken_at: the first line (from 1) that does not follow from
    what is before it, None where every one does; why_broken: how it shows."""

    folder: Path
    records: Sequence[Record]
    broken_at: int | None = None
    why_broken: str = ""

    @property
    def verified(self) -> list[Record]:
        """Those before the first broken line."""
        return [r for r in self.records if self.broken_at is None or r.number < self.broken_at]

    @property
    def head(self) -> str:
        """Hash of the last line."""
        return self.records[-1].sha256 if self.records else START

    def describe(self) -> str:
        if self.broken_at is not None:
            return f"BROKEN at line {self.broken_at}: {self.why_broken}"
        return f"{len(self.records)} lines, each follows from the one before; the last is {self.head}"

    def find(self, prefix: str) -> Record:
        """The verified record whose id begins so. Raises: EvidenceError for none or several."""
        found = [record for record in self.verified if record.sha256.startswith(prefix)]
        if len(found) != 1 or not prefix:
            raise EvidenceError(
                "no such record" if not found else "several records begin so",
                found=prefix,
                expected=f"the beginning of one id of {', '.join(r.id for r in self.verified[-8:]) or 'none'}",
                where=self.folder / FILE,
            )
        return found[0]


def append(folder: Path, claim: Claim) -> Record:
    """Add a claim as the next line; the folder is made where there is none. Safe beside other processes that append.

    Raises: EvidenceError when the lines so far are broken or the claim holds what JSON does not, OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        chain = _read(folder, file.read())
        if chain.broken_at is not None:
            raise EvidenceError(
                "the records are broken, nothing is added to them",
                found=f"line {chain.broken_at}: {chain.why_broken}",
                where=folder / FILE,
                remedy="Keep them as they are, and begin in another folder.",
            )
        body = {
            **_fields(claim),
            "format": FORMAT,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "previous_sha256": chain.head,
        }
        try:
            line = _dump({**body, "sha256": _sha256(_dump(body))})
        except (TypeError, ValueError) as error:
            raise EvidenceError("a claim that JSON cannot hold", found=error, where=claim.kind) from error
        file.write(line + b"\n")
    return _record(json.loads(line), line, len(chain.records) + 1)


def read(folder: Path) -> Chain:
    """Read and verify all lines. Raises: EvidenceError when the folder has no records."""
    try:
        data = (folder / FILE).read_bytes()
    except OSError as error:
        raise EvidenceError("no records", found=error, expected=f"a folder with {FILE}", where=folder) from error
    return _read(folder, data)


def _read(folder: Path, data: bytes) -> Chain:
    records: list[Record] = []
    broken_at, why = None, ""
    previous = START
    lines = data.split(b"\n")
    for number, line in enumerate(lines[:-1] if not lines[-1] else lines, start=1):
        problem = ""
        try:
            document = json.loads(line)
            record, own = _record(document, line, number), document.pop("sha256")
            if own != _sha256(_dump(document)):
                problem = "its own hash is another: it was changed"
            elif record.previous_sha256 != previous:
                problem = "the line before it is another than when it was written"
            records.append(record)
        except (ValueError, KeyError, TypeError, EvidenceError) as error:
            problem = f"it is no record ({type(error).__name__}: {error})"
        if not problem and number == len(lines):
            problem = "it ends in the middle"
        if problem and broken_at is None:
            broken_at, why = number, problem
        previous = _sha256(line)
    return Chain(folder, records, broken_at, why)


def _record(document: Mapping[str, Any], line: bytes, number: int) -> Record:
    """Raises: KeyError, TypeError, ValueError, EvidenceError."""
    if document["format"] != FORMAT:
        raise ValueError(f"format {document['format']}, not {FORMAT}")
    values = {f.name: document[f.name] for f in fields(Claim)}
    values["figures"] = [Figure(**figure) for figure in values["figures"]]
    return Record(number, str(document["date"]), str(document["previous_sha256"]), _sha256(line), Claim(**values))


def _fields(claim: Claim) -> dict[str, Any]:
    shallow = {f.name: getattr(claim, f.name) for f in fields(Claim)}
    return {**shallow, "figures": [asdict(figure) for figure in claim.figures]}


def _dump(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
