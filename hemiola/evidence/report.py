"""Records as a report: tables, comparisons and plots, in one HTML page that needs nothing else, or in Markdown.

A row begins with its marks. What is VOID or PENDING has that word in the place of every figure. Two records are
compared only where `comparison.why_not` finds no reason against it; else the page says what was declined and why.
Lines from a broken one of the chain on are shown as UNVERIFIED, and nothing is compared with them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from hemiola.evidence.comparison import compare, why_not
from hemiola.evidence.records import SPEEDS, Chain, Claim, Figure, Mark, Record
from hemiola.evidence.report_plot import step_times

UNVERIFIED = "UNVERIFIED"
_WITH_VERDICT = ("gate", "legs", "trace")
_NO_VALUE = (Mark.VOID, Mark.PENDING)
_TITLES = {"gate": "Gates", "bench": "Benchmarks", "legs": "Legs", "trace": "Traces", "load": "Load on a server"}


@dataclass(frozen=True, slots=True)
class Table:
    """rows: texts, as many as columns; the first two are a record's id and its marks."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def render_html(chain: Chain) -> str:
    """The whole page; every text of a record is escaped."""
    state = "broken" if chain.broken_at is not None else "whole"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Records in {escape(chain.folder.name)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>Records in {escape(chain.folder.name)}</h1>",
        f'<p class="chain {state}">{escape(chain.describe())}</p>',
        f"<p>{escape(_summary(chain))}</p>",
    ]
    for table in tables(chain):
        parts.append(_html_table(table))
        if table.title == _TITLES["bench"]:
            parts += [f"<figure>{svg}</figure>" for svg in step_times(chain.verified)]
    if lines := list(comparisons(chain)):
        parts += ["<h2>Comparisons</h2>", "<ul>"]
        parts += [f'<li class="{_kind(line)}">{escape(line)}</li>' for line in lines]
        parts.append("</ul>")
    parts.append("<h2>Every record</h2>")
    parts += [_html_record(chain, record) for record in chain.records]
    return "\n".join([*parts, "</body></html>"]) + "\n"


def render_markdown(chain: Chain) -> str:
    """The tables and comparisons, without the plots."""
    lines = [f"# Records in {_plain(chain.folder.name)}", "", f"{chain.describe()}.", "", _summary(chain), ""]
    for table in tables(chain):
        lines += [f"## {table.title}", "", _markdown_row(table.columns), _markdown_row(["---"] * len(table.columns))]
        lines += [*(_markdown_row([_plain(text) for text in row]) for row in table.rows), ""]
    if compared := list(comparisons(chain)):
        lines += ["## Comparisons", "", *(f"- {_plain(line)}" for line in compared), ""]
    return "\n".join(lines)


def tables(chain: Chain) -> Iterator[Table]:
    """One for each kind of claim: gates first, then speeds, then whatever else."""
    kinds = {record.claim.kind: None for record in chain.records}
    for kind in (*(k for k in _TITLES if k in kinds), *(k for k in kinds if k not in _TITLES)):
        records = [record for record in chain.records if record.claim.kind == kind]
        names = list({figure.name: None for record in records for figure in record.claim.figures})
        about = ("record", "marks", *(["verdict"] if kind in _WITH_VERDICT else []), "model", "what", "engine", "on")
        columns = [*about, *names, "rests on" if kind in SPEEDS else "why marked"]
        yield Table(_TITLES.get(kind, kind), columns, [_row(chain, record, kind, names) for record in records])


def comparisons(chain: Chain) -> Iterator[str]:
    """Each verified record of a speed with the latest one before it, of the same kind, model and cell, that it may be
    compared with; where there are only others, what was declined."""
    earlier: dict[tuple[str, Any, Any], list[Record]] = {}
    for record in chain.verified:
        claim = record.claim
        if claim.kind not in ("bench", "load") or Mark.VOID in claim.marks:
            continue
        others = earlier.setdefault((claim.kind, claim.model.get("name"), claim.workload.get("cell")), [])
        if others:
            like = [other for other in others if not why_not(other.claim, claim)]
            yield from (f"{line} [{record.id}]" for line in compare((like or others)[-1], record))
        others.append(record)


def marks_of(chain: Chain, record: Record) -> list[str]:
    """The marks of a record's claim, and that it cannot be verified."""
    is_verified = chain.broken_at is None or record.number < chain.broken_at
    return [*([] if is_verified else [UNVERIFIED]), *record.claim.marks]


def _row(chain: Chain, record: Record, kind: str, names: Sequence[str]) -> list[str]:
    claim, marks = record.claim, marks_of(chain, record)
    figures = {figure.name: figure for figure in claim.figures}
    unmeasured = _unmeasured(claim)
    known = "\n".join(f"{r.id} ({r.claim.verdict})" for r in chain.verified if r.id in claim.gated_by)
    return [
        record.id,
        " ".join(marks),
        *([unmeasured or claim.verdict] if kind in _WITH_VERDICT else []),
        str(claim.model.get("name", "")),
        _what(claim),
        _engine(claim.engine),
        _machine(claim),
        *(unmeasured or (_figure(figures[name]) if name in figures else "") for name in names),
        "\n".join([*([known] if known else []), *(f"{mark}: {reason}" for mark, reason in claim.marks.items())]),
    ]


def _unmeasured(claim: Claim) -> str:
    """What stands in the place of figures that do not hold; "" where they do."""
    return next((mark.value for mark in _NO_VALUE if mark in claim.marks), "")


def _what(claim: Claim) -> str:
    workload = claim.workload
    if claim.kind == "gate":
        return f"{workload.get('prompts')} prompts, {' and '.join(workload.get('modes', ()))}; {workload.get('oracle')}"
    if "cell" in workload:
        return str(workload["cell"])
    told = {name: " ".join(map(str, v)) if isinstance(v, list) else v for name, v in workload.items() if v}
    return ", ".join(f"{name} {value}" for name, value in told.items() if name != "cache")


def _engine(engine: Mapping[str, Any]) -> str:
    """Arms that most ops have, and those that differ; the numeric mode."""
    if "legs" in engine:
        return "\n".join(f"{name}: {arms}" for name, arms in engine["legs"].items())
    if "arms" not in engine:
        return "not stated"
    arms: Mapping[str, str] = engine["arms"]
    most = max(sorted(set(arms.values())), key=list(arms.values()).count)
    others = [f"{op}={arm}" for op, arm in arms.items() if arm != most]
    invariant = ", invariant" if engine.get("invariant") else ""
    return f"{','.join([most, *others])}\n{engine['dtype']}, KV {engine['kv_dtype']}{invariant}"


def _machine(claim: Claim) -> str:
    clocks = claim.machine.get("clock_mhz")
    clock = f"\n{clocks['min']:.0f} .. {clocks['max']:.0f} MHz" if clocks else ""
    return f"{claim.machine.get('device') or 'not stated'}{clock}\n{claim.code}"


def _figure(figure: Figure) -> str:
    if figure.value is None:
        return f"none: {figure.why}"
    spread = ", ".join(
        text
        for text in (
            "" if figure.low is None or figure.high is None else f"{number(figure.low)} .. {number(figure.high)}",
            f"n {figure.n:,}" if figure.n > 1 else "",
        )
        if text
    )
    unit = f" {figure.unit}" if figure.unit else ""
    return f"{number(figure.value)}{unit}" + (f"\n{spread}" if spread else "")


def number(value: float) -> str:
    """Four digits that count, or all of a whole number."""
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _summary(chain: Chain) -> str:
    counts: dict[str, int] = {}
    for record in chain.records:
        for mark in marks_of(chain, record):
            counts[mark] = counts.get(mark, 0) + 1
    told = ", ".join(f"{count} {mark}" for mark, count in counts.items())
    dates = f", {chain.records[0].date} to {chain.records[-1].date}" if chain.records else ""
    return f"{len(chain.records)} records{dates}. {f'Marked: {told}.' if told else 'None is marked.'}"


def _kind(line: str) -> str:
    return "declined" if line.startswith("declined") else "compared"


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = []
    for identifier, marks, *texts in table.rows:
        badges = " ".join(f'<b class="mark {escape(mark.lower())}">{escape(mark)}</b>' for mark in marks.split())
        cells = "".join(f"<td{_tone(text)}>{escape(text)}</td>" for text in texts)
        link = f'<a href="#{escape(identifier)}">{escape(identifier)}</a>'
        rows.append(f'<tr class="{escape(marks.lower())}"><td>{link}</td><td>{badges}</td>{cells}</tr>')
    body = "\n".join(rows)
    return f'<h2>{escape(table.title)}</h2>\n<div class="wide"><table><tr>{head}</tr>\n{body}\n</table></div>'


def _tone(text: str) -> str:
    if text in _TONES:
        return f' class="{_TONES[text]}"'
    return ' class="long"' if max(map(len, text.split("\n"))) > _LONG else ""


def _html_record(chain: Chain, record: Record) -> str:
    marks = " ".join(marks_of(chain, record))
    title = f"{record.id} {record.date} {record.claim.kind} {record.claim.model.get('name', '')} {marks}"
    shown = {**asdict(record.claim), "previous_sha256": record.previous_sha256, "line": record.number}
    if word := _unmeasured(record.claim):
        shown |= {"figures": word, "verdict": word, "more": word}
    text = json.dumps(shown, indent=1)
    return f'<details id="{escape(record.id)}"><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>'


def _markdown_row(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, in one line."""
    for letter in "\\`*_[]|":
        text = text.replace(letter, f"\\{letter}")
    return ", ".join(" ".join(line.split()) for line in escape(text, quote=False).split("\n") if line.strip())


_LONG = 36  # letters of a line that may be wrapped
_TONES = {"STRICT PASS": "good", "NOISE PASS": "good", "DIVERGENCE": "bad"}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2126; background: #fff; margin: 2rem auto; max-width: 96rem;
  padding: 0 1.2rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.chain { font: 13px ui-monospace, monospace; padding: .6rem .8rem; border-left: 4px solid #3a8f3a; background: #f3f8f3;
  overflow-wrap: anywhere; }
.chain.broken { border-color: #b02020; background: #fbeeee; color: #8c1414; font-weight: bold; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; }
th { text-align: left; font-weight: 600; border-bottom: 2px solid #cfd6dc; padding: .35rem .5rem;
  vertical-align: bottom; }
td { border-bottom: 1px solid #e6eaee; padding: .35rem .5rem; vertical-align: top;
  white-space: pre; }
td:first-child, pre { font-family: ui-monospace, monospace; }
td.long { white-space: pre-line; min-width: 16rem; }
a { color: #1f6fb4; }
.mark { font-size: 11px; padding: .1rem .35rem; border-radius: 3px; background: #8a4fb0; color: #fff; }
.mark.ungated { background: #b86114; } .mark.void, .mark.unverified { background: #b02020; }
.mark.pending { background: #68727c; } .mark.unsteady { background: #8a7a10; }
tr.void td, tr.pending td, tr.unverified td { color: #68727c; }
.good { color: #25702a; font-weight: 600; } .bad { color: #b02020; font-weight: 600; }
li.declined { color: #68727c; }
figure { margin: 1.5rem 0; } figure svg { max-width: 100%; height: auto; }
details { border-bottom: 1px solid #e6eaee; padding: .3rem 0; } summary { cursor: pointer; font-size: 13px; }
pre { font-size: 12px; overflow-x: auto; background: #f6f8fa; padding: .8rem; }
"""
