"""The timeline of a report as one SVG file: four panels of step lines, one above the other.

Written by hand: four step lines are a page of code, and matplotlib would be a dependency of 30 MB for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from hemiola.simulate.report import Report

WIDTH, PANEL, GAP, LEFT, RIGHT, TOP = 960, 150, 56, 90, 150, 48  # pixels
COLOURS = ("#1f6fb4", "#d1701b", "#3a8f3a", "#8a4fb0")


class Line(NamedTuple):
    name: str
    values: Sequence[float]


class Panel(NamedTuple):
    """limit: drawn as a dashed line; 0 is none."""

    title: str
    lines: tuple[Line, ...]
    limit: float = 0


def render_svg(report: Report) -> str:
    """The whole file. Each point shows the highest value until the next one."""
    panels, times = _panels(report), report.timeline["time_s"]
    height = TOP + len(panels) * (PANEL + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12" fill="#222"><rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        _text(LEFT, 24, f"{report.model['name']}: {report.simulated_s:,.1f} simulated seconds", size=15),
    ]
    for index, panel in enumerate(panels):
        parts += _draw(panel, times, report.simulated_s, TOP + 16 + index * (PANEL + GAP))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panels(report: Report) -> tuple[Panel, ...]:
    column, plan = report.timeline, report.plan
    return (
        Panel("requests", (Line("running", column["num_running"]), Line("waiting", column["num_waiting"]))),
        Panel(
            "tokens per step",
            (Line("prefill", column["num_prefill_tokens"]), Line("decode", column["num_decodes"])),
            report.settings["max_num_batched_tokens"],
        ),
        Panel(
            "KV blocks",
            (Line("held", column["blocks_held"]), Line("findable", column["blocks_published"])),
            plan["num_blocks"],
        ),
        Panel(
            "states",
            (
                Line("state slots", column["slots_held"]),
                Line("snapshots", column["snapshots"]),
                Line("on the host", column["host_snapshots"]),
            ),
            max(plan["num_slots"], plan["num_snapshots"]),
        ),
    )


def _draw(panel: Panel, times: Sequence[float], end_s: float, top: float) -> list[str]:
    bottom, right = top + PANEL, WIDTH - RIGHT
    highest = max(panel.limit, *(max(line.values) for line in panel.lines), 1)

    def x(time_s: float) -> float:
        return LEFT + (right - LEFT) * (time_s / end_s if end_s else 0.0)

    def y(value: float) -> float:
        return bottom - PANEL * value / highest

    parts = [_text(LEFT, top - 8, panel.title, size=13)]
    for part in (0, 0.5, 1):
        parts.append(_rule(LEFT, y(part * highest), right, "#ddd"))
        parts.append(_text(LEFT - 8, y(part * highest) + 4, f"{part * highest:,.4g}", anchor="end"))
        parts.append(_text(x(part * end_s), bottom + 18, f"{part * end_s:,.4g} s", anchor="middle"))
    if panel.limit:
        parts.append(_rule(LEFT, y(panel.limit), right, "#888", dash="5 4"))
        parts.append(_text(right + 12, top + 4, f"limit {panel.limit:,.0f}"))
    for index, line in enumerate(panel.lines):
        path = f"M{x(0):.1f} {y(line.values[0]):.1f}"
        for start_s, value in zip(times, line.values, strict=True):
            path += f"H{x(start_s):.1f}V{y(value):.1f}"
        path += f"H{right}"
        parts.append(f'<path d="{path}" fill="none" stroke="{COLOURS[index]}" stroke-width="1.5"/>')
        parts.append(_text(right + 12, top + 28 + 18 * index, line.name, colour=COLOURS[index]))
    return parts


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", colour: str = "#222") -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _rule(left: float, y: float, right: float, colour: str, dash: str = "none") -> str:
    ends = f'x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-dasharray="{dash}"/>'
