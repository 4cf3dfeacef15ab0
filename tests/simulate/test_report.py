"""Report: figures by hand, JSON, tables and plot."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from hemiola.cache.budget import CachePlan
from hemiola.config.engine import EngineConfig
from hemiola.config.model import NemotronHConfig
from hemiola.simulate.cost import CostModel
from hemiola.simulate.geometry import Geometry
from hemiola.simulate.plot import render_svg
from hemiola.simulate.report import NUM_POINTS, PoolUse, Report, Spread, build_report, to_json
from hemiola.simulate.run import Simulation
from hemiola.simulate.table import render
from hemiola.simulate.trace import Arrival
from tests.support.variants import tiny

CONFIG = EngineConfig(prefix_caching=False, max_num_batched_tokens=8, max_model_len=64)
COST = CostModel(1.0, 0.25, 0.125, 64.0, 64.0)
GEOMETRY = Geometry("a <tiny> model", NemotronHConfig.from_dict(tiny("M*")), 4, 4)
ARRIVALS = [
    Arrival("a", (1, 2, 3), 3, 0.0),
    Arrival("b", (4, 5), 1, 2.0),
    Arrival("c", (5,), 1, 20.0),
    Arrival("d", (5,) * 70, 1, 1.0),
    Arrival("e", (5,) * 80, 1, 1.0),
    Arrival("f", (5,), 1, 1.0, abort_after_s=0.5),
]


@pytest.fixture(scope="module")
def report() -> Report:
    """test_run.test_times_by_hand, with three requests more that never run."""
    plan = CachePlan(8, 64, 16, 2, 64, 0, 0, ())
    run = Simulation(ARRIVALS, plan, CONFIG, COST, max_model_len=64, chunk_size=16).run()
    return build_report(run, GEOMETRY, CONFIG, COST)


def test_percentiles_are_nearest_rank() -> None:
    assert Spread.of([]) is None
    assert Spread.of([7.0]) == Spread(1, 7, 7, 7, 7, 7)
    assert Spread.of(range(10, 0, -1)) == Spread(10, 5.5, 5, 9, 10, 10)
    assert Spread.of(range(1, 201)) == Spread(200, 100.5, 100, 180, 198, 200)


def test_the_figures(report: Report) -> None:
    assert report.outcomes == {"finished": 3, "aborted": 1, "refused": 2}
    assert report.refusals == {"longer than the model allows": 2}
    assert report.simulated_s == 22.1875
    assert report.output_tokens_per_s == 5 / 22.1875
    assert report.times_s["queueing"] == Spread(3, 0.1875, 0.0, 0.5625, 0.5625, 0.5625)
    assert report.times_s["first_token"] == Spread(3, (2.5625 + 5.4375 + 2.1875) / 3, 2.5625, 5.4375, 5.4375, 5.4375)
    assert report.times_s["between_tokens"] == Spread(2, 4.21875, 3.5625, 4.875, 4.875, 4.875)
    assert report.times_s["end_to_end"] == Spread(3, (11 + 5.4375 + 2.1875) / 3, 5.4375, 11, 11, 11)
    assert report.steps.rows == Spread(4, 1.25, 1, 2, 2, 2)
    assert report.steps.tokens == Spread(4, 2, 1, 3, 3, 3)
    assert report.steps.budget_used == 8 / (8 * 4)
    assert report.prefix.misses == {"disabled": 3}
    assert report.prefix.cached_share == 0.0


def test_pools_are_weighed_by_time(report: Report) -> None:
    held_s = 2.5625 + 2 * 4.875 + 3.5625 + 2.1875
    assert report.pools["slots_held"] == PoolUse(2, held_s / 22.1875, 2)
    assert report.pools["blocks_held"] == PoolUse(8, held_s / 22.1875, 2)
    assert report.pools["snapshots"] == PoolUse(0, 0.0, 0)


def test_the_timeline_has_peaks_and_gaps(report: Report) -> None:
    timeline, width = report.timeline, 22.1875 / NUM_POINTS
    assert {len(column) for column in timeline.values()} == {NUM_POINTS}
    for second, slots in ((0.0, 1), (2.4, 1), (2.6, 2), (7.43, 2), (7.6, 1), (11.2, 0), (19.8, 0), (20.1, 1)):
        assert timeline["slots_held"][int(second / width)] == slots, second
    assert max(timeline["num_waiting"]) == 0


def test_json_has_everything_and_its_assumptions(report: Report) -> None:
    values: dict[str, Any] = json.loads(json.dumps(to_json(report), allow_nan=False))
    assert values["cost"] == {
        "fixed_s": 1.0,
        "decode_row_s": 0.25,
        "prefill_token_s": 0.125,
        "device_bytes_per_s": 64.0,
        "host_bytes_per_s": 64.0,
    }
    assert [r["outcome"] for r in values["requests"]] == [*["finished"] * 3, "refused", "refused", "aborted"]
    assert values["settings"]["max_num_batched_tokens"] == 8
    assert values["plan"]["num_blocks"] == 8
    assert values["times_s"]["first_token"]["p50"] == 2.5625


def test_a_table_for_people(report: Report) -> None:
    console = Console(width=100, file=io.StringIO(), record=True)
    render(report, console)
    text = console.export_text()
    assert "6 requests: 3 finished, 1 aborted, 2 refused; 22.2 s simulated, 0.2 output tokens/s" in text
    assert "refused: 2 x longer than the model allows" in text
    assert "cost model: fixed_s 1, decode_row_s 0.25" in text
    (line,) = (line for line in text.splitlines() if "between tokens" in line)
    assert [cell.strip() for cell in line.split("│")[2:8]] == ["2", "4,219", "3,562", "4,875", "4,875", "4,875"]


def test_the_plot_is_well_formed(report: Report) -> None:
    root = ET.fromstring(render_svg(report))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "a <tiny> model: 22.2 simulated seconds" in texts
    assert {"requests", "tokens per step", "KV blocks", "states"} <= set(texts)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) == 9
    higher = {**report.timeline, "blocks_held": [8.0] * NUM_POINTS}
    assert render_svg(replace(report, timeline=higher)) != render_svg(report)
