"""Records: what is written is read again, and every change to a line shows."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from dataclasses import asdict
from pathlib import Path

import pytest

from hemiola.evidence import EvidenceError
from hemiola.evidence.records import FILE, START, Claim, Figure, append, read
from tests.support.claims import bench_claim, gate_claim


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "evidence"
    for batch in (1, 8, 64):
        append(folder, bench_claim(batch))
    return folder


def plain(claim: Claim) -> str:
    return json.dumps(asdict(claim), sort_keys=True)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    claims = [gate_claim(), bench_claim()]
    written = [append(tmp_path / "new" / "folder", claim) for claim in claims]
    chain = read(tmp_path / "new" / "folder")
    assert chain.broken_at is None
    assert list(chain.records) == written
    assert [plain(record.claim) for record in chain.records] == [plain(claim) for claim in claims]
    assert [record.number for record in chain.records] == [1, 2]


def test_each_line_has_the_hash_of_the_bytes_before_it(folder: Path) -> None:
    lines = (folder / FILE).read_bytes().splitlines()
    previous = [json.loads(line)["previous_sha256"] for line in lines]
    assert previous == [START, *(hashlib.sha256(line).hexdigest() for line in lines[:-1])]
    assert read(folder).head == hashlib.sha256(lines[-1]).hexdigest()


@pytest.mark.parametrize(
    ("change", "line", "why"),
    [
        (lambda a, b, c: [a, b.replace(b'"value":4.0', b'"value":3.0'), c], 2, "changed"),
        (lambda a, b, c: [a, b, c.replace(b'"value":4.0', b'"value":3.0')], 3, "changed"),
        (lambda a, b, c: [a, c], 2, "the line before it is another"),
        (lambda a, b, c: [b, c], 1, "the line before it is another"),
        (lambda a, b, c: [a, c, b], 2, "the line before it is another"),
        (lambda a, b, c: [a, a, b, c], 2, "the line before it is another"),
        (lambda a, b, c: [a, b, c[:-40]], 3, "no record"),
        (lambda a, b, c: [a, b, c.rstrip(b"\n")], 3, "ends in the middle"),
        (lambda a, b, c: [a, b"{}\n", c], 2, "no record"),
        (lambda a, b, c: [a, b"\xff\n", b, c], 2, "no record"),
        (lambda a, b, c: [a, b.replace(b'"sha256":', b'"sha255":'), c], 2, "no record"),
        (lambda a, b, c: [a, b.replace(b'"value":4.0', b'"value":NaN'), c], 2, "no record"),
    ],
)
def test_the_first_broken_line_is_named(folder: Path, change: object, line: int, why: str) -> None:
    lines = (folder / FILE).read_bytes().splitlines(keepends=True)
    (folder / FILE).write_bytes(b"".join(change(*lines)))  # type: ignore[operator]
    chain = read(folder)
    assert chain.broken_at == line
    assert why in chain.why_broken
    assert f"BROKEN at line {line}" in chain.describe()
    assert [record.number for record in chain.verified] == list(range(1, line))
    before = (folder / FILE).read_bytes()
    with pytest.raises(EvidenceError, match=f"nothing is added to them; found line {line}"):
        append(folder, bench_claim())
    assert (folder / FILE).read_bytes() == before


def test_a_hash_that_was_mended_breaks_the_next_line(folder: Path) -> None:
    """Whoever changes a figure and its line's own hash has to write every line after it again."""
    first, second, third = (folder / FILE).read_bytes().splitlines()
    document = json.loads(second.replace(b'"value":4.0', b'"value":3.0'))
    del document["sha256"]
    body = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    document["sha256"] = hashlib.sha256(body).hexdigest()
    mended = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    (folder / FILE).write_bytes(b"\n".join([first, mended, third, b""]))
    assert read(folder).broken_at == 3


def _append_some(folder: Path) -> None:
    for batch in range(1, 11):
        append(folder, bench_claim(batch))


def test_processes_that_append_at_once_keep_the_chain_whole(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_append_some, args=(tmp_path,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    chain = read(tmp_path)
    assert (len(chain.records), chain.broken_at) == (40, None)


@pytest.mark.parametrize("kind", ["bench", "legs", "load"])
def test_a_speed_says_what_vouches_for_it(kind: str) -> None:
    with pytest.raises(EvidenceError, match="a speed without a verdict on its tokens"):
        Claim(kind, ["x"], {})
    for mark in ("UNGATED", "VOID", "PENDING"):
        Claim(kind, ["x"], {}, marks={mark: "so"})
    with pytest.raises(EvidenceError, match="a speed without"):
        Claim(kind, ["x"], {}, marks={"UNSTEADY": "so"})


def test_marks_and_figures_are_held_to_their_form(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="unknown marks"):
        gate_claim(marks={"FINE": "so"})
    with pytest.raises(EvidenceError, match="a figure without a value"):
        Figure("time", None, "ms")
    with pytest.raises(EvidenceError, match="JSON cannot hold"):
        append(tmp_path, gate_claim(figures=[Figure("time", float("nan"), "ms")]))
    assert (tmp_path / FILE).read_bytes() == b""


def test_a_record_is_found_by_the_beginning_of_its_id(folder: Path) -> None:
    chain = read(folder)
    assert chain.find(chain.records[1].id[:6]) == chain.records[1]
    for prefix in ("", "zz"):
        with pytest.raises(EvidenceError, match=r"no such record|several records"):
            chain.find(prefix)
    with pytest.raises(EvidenceError, match="no records"):
        read(folder / "elsewhere")
