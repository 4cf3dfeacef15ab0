"""`hemiola report`: what it shows, and what it must not show; in a real browser, too, where there is one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from hemiola.cli import app
from hemiola.cli.ending import FAILED
from hemiola.evidence.comparison import why_not
from hemiola.evidence.records import FILE, Chain, Claim, Figure, append, read
from hemiola.evidence.report import UNVERIFIED, render_html, render_markdown
from hemiola.evidence.report_plot import step_times
from tests.support.claims import ENGINE, MACHINE, MODEL, SOURCE, bench_claim, gate_claim

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
UNGATED = {"UNGATED": "no gate record of this commit and engine"}
HOSTILE = '<script>document.title = "owned"</script> | `x` <img src=x onerror=alert(1)>'
WRONG = 987.125  # a figure that does not hold
OTHER = {**MACHINE, "device": "GPU Y"}

RENDER: list[Callable[[Chain], str]] = [render_html, render_markdown]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "evidence"
    gate = append(folder, gate_claim())
    append(folder, gate_claim(verdict="DIVERGENCE", model={**gate_claim().model, "name": HOSTILE}))
    for batch, ms in ((1, 2.0), (8, 4.0), (64, 12.0)):
        append(folder, bench_claim(batch, ms, gated_by=[gate.id]))
    append(folder, bench_claim(8, 3.0, gated_by=[], marks=UNGATED))
    append(folder, bench_claim(8, 1.0, machine=OTHER, gated_by=[], marks=UNGATED))
    append(folder, bench_claim(64, 11.0, marks={"UNSTEADY": "power cap in 40 of 83 samples"}))
    append(folder, bench_claim(64, WRONG, marks={"VOID": "the arm that was to run did not"}, more={"ms": WRONG}))
    append(folder, Claim("bench", ["x"], SOURCE, {"name": "m"}, marks={"VOID": "status 137, in load"}))
    waits = [Figure("difference", WRONG, "ms"), Figure("ratio", None, "", why="not measured yet")]
    append(folder, Claim("legs", ["x"], SOURCE, MODEL, ENGINE, MACHINE, marks={"PENDING": "no GPU"}, figures=waits))
    return folder


def rows(text: str, kind: Callable[[Chain], str]) -> list[str]:
    """The rows of tables, each as one line of text."""
    if kind is render_markdown:
        return [line for line in text.splitlines() if line.startswith("| ")]
    found = re.findall(r"<tr.*?</tr>", text, re.DOTALL)
    return [re.sub(r"<.*?>", " ", row).replace("\n", " ") for row in found]


@pytest.mark.parametrize("render", RENDER)
def test_marks_and_verdicts_are_in_their_rows(folder: Path, render: Callable[[Chain], str]) -> None:
    chain = read(folder)
    text = render(chain)
    table = {record.id: next(row for row in rows(text, render) if record.id in row) for record in chain.records}
    for record in chain.records:
        for mark, reason in record.claim.marks.items():
            assert mark in table[record.id]
            assert reason in table[record.id]
    gate, red, first, *_ = chain.records
    assert "NOISE PASS" in table[gate.id]
    assert "DIVERGENCE" in table[red.id]
    assert f"{gate.id} (NOISE PASS)" in table[first.id]
    assert "2 ms" in table[first.id]
    assert "1.98 .. 2.04, n 3" in table[first.id]
    assert "GPU X" in table[first.id]
    assert "Marked: 2 UNGATED, 1 UNSTEADY, 2 VOID, 1 PENDING." in text
    assert chain.head in text


@pytest.mark.parametrize("render", RENDER)
def test_a_figure_that_does_not_hold_is_nowhere(folder: Path, render: Callable[[Chain], str]) -> None:
    chain = read(folder)
    text = render(chain)
    assert "987.1" not in text
    for record in chain.records:
        if {"VOID", "PENDING"} & set(record.claim.marks):
            row = next(row for row in rows(text, render) if record.id in row)
            assert " ms" not in row
            assert "tokens/s" not in row


@pytest.mark.parametrize("render", RENDER)
def test_like_is_compared_and_the_rest_declined_by_name(folder: Path, render: Callable[[Chain], str]) -> None:
    text = render(read(folder))
    ids = [record.id for record in read(folder).records]
    assert f"UNGATED against {ids[3]} (the same engine), time per step: 0.750 times (4 " in text
    assert f"declined, decode 8 x 128 against {ids[5]}: hardware differs: GPU X, GPU Y" in text
    assert f"declined, decode 64 x 128 against {ids[4]}: clock state is unsteady" in text
    assert text.count(" times (") == 2


def test_no_ratio_has_two_sides_that_differ(tmp_path: Path) -> None:
    """Every combination of hardware, clock, cache, model and workload, twice: only each with itself is compared."""
    caches = {"state": "cold"}, {"state": "warm"}, None
    clocks = [{name: mhz for name in ("start", "min", "median", "max")} for mhz in (1980, 1500)]
    models = MODEL, {**MODEL, "stored": ["mamba projections: BF16"]}
    for device, clock, cache, model, steps in list(product("XY", clocks, caches, models, (16, 32))) * 2:
        claim = bench_claim(8, 4.0, model=model, machine={**MACHINE, "device": device, "clock_mhz": clock})
        append(tmp_path, replace(claim, workload={**claim.workload, "cache": cache, "output_tokens": steps}))
    chain = read(tmp_path)
    text = render_html(chain)
    pairs = re.findall(r"<li[^>]*>against (\w+) .* times .*\[(\w+)\]", text)
    assert len(pairs) == 2 * 2 * 2 * 2 * 2 * 2, "two figures each, and none where the cache state is not known"
    for before, after in pairs:
        one, other = chain.find(before).claim, chain.find(after).claim
        assert why_not(one, other) == ""
        assert (one.machine, one.workload, one.model) == (other.machine, other.workload, other.model)


@pytest.mark.parametrize("render", RENDER)
def test_what_comes_after_a_broken_link_is_unverified(folder: Path, render: Callable[[Chain], str]) -> None:
    lines = (folder / FILE).read_bytes().splitlines(keepends=True)
    (folder / FILE).write_bytes(b"".join([*lines[:5], lines[5].replace(b'"value":3.0', b'"value":2.5'), *lines[6:]]))
    chain = read(folder)
    text = render(chain)
    assert "BROKEN at line 6: its own hash is another" in text
    assert " times (" not in text, "the only pair that may be compared has a side that cannot be verified"
    for record in chain.records:
        row = next(row for row in rows(text, render) if record.id in row)
        assert (UNVERIFIED in row) is (record.number >= 6)


def test_text_is_text(folder: Path) -> None:
    page = render_html(read(folder))
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;document.title" in page
    assert not re.search(r"(?:src|href)=\"(?!#)|@import|url\(|https?://(?!www\.w3\.org/2000/svg)", page)
    row = next(line for line in render_markdown(read(folder)).splitlines() if "DIVERGENCE" in line)
    assert "<" not in row
    assert (
        row.count("|") - row.count("\\|") == len(rows(render_markdown(read(folder)), render_markdown)[0].split("|")) - 1
    )
    assert "\\`x\\`" in row


def test_a_plot_is_of_one_machine_and_hollow_where_nothing_vouches(folder: Path) -> None:
    plots = [ElementTree.fromstring(plot) for plot in step_times(read(folder).verified)]
    circles = [[c.get("fill") for c in plot.iter("{http://www.w3.org/2000/svg}circle")] for plot in plots]
    texts = ["".join(plot.itertext()) for plot in plots]
    assert ["GPU X" in text for text in texts] == [True, False]
    assert ["GPU Y" in text for text in texts] == [False, True]
    assert circles == [["#1f6fb4", "#fff", "#fff"], ["#fff"]], "at batch 1, 8 and 64; the latest of each"


def test_the_command_writes_both_forms_and_fails_where_the_chain_is_broken(folder: Path, tmp_path: Path) -> None:
    page, table = tmp_path / "r.html", tmp_path / "r.md"
    arguments = ["report", str(folder), "-o", str(page), "--markdown", str(table)]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (0, "")
    assert page.read_text() == render_html(read(folder))
    assert table.read_text() == CliRunner().invoke(app, ["report", str(folder)]).stdout
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-9])
    assert CliRunner().invoke(app, arguments).exit_code == FAILED
    assert "BROKEN at line 11" in page.read_text()


def test_the_page_in_a_browser(folder: Path, tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    if BROWSER is None:
        pytest.skip("there is no Chromium here")
    file = tmp_path / "report.html"
    file.write_text(render_html(read(folder)), encoding="utf-8")
    problems: list[str] = []
    requests: list[str] = []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page: Any = browser.new_page(viewport={"width": 1280, "height": 900})
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text))
        page.on("dialog", lambda dialog: problems.append(dialog.message))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(file.as_uri())
        shown = page.inner_text("body")
        assert page.title() == "Records in evidence", "no text of a record ran as a script"
        assert HOSTILE in shown
        assert "987.1" not in page.content()
        marks = page.locator("td .mark").all_inner_texts()
        assert sorted(marks) == sorted(["UNGATED"] * 2 + ["VOID"] * 2 + ["PENDING", "UNSTEADY"])
        assert page.locator("figure svg").count() == 2
        assert all(box["height"] > 200 for box in (f.bounding_box() for f in page.locator("figure svg").all()))
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "tables scroll, the page does not"
        details = page.locator("details").first
        assert not details.locator("pre").is_visible()
        details.locator("summary").click()
        assert '"verdict": "NOISE PASS"' in details.locator("pre").inner_text()
        page.screenshot(path=str(tmp_path / "report.png"), full_page=True)
        browser.close()
    assert problems == []
    assert requests == [file.as_uri()], "it needs nothing from elsewhere"
