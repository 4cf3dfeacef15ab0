"""Time per decode step over the batch size, one SVG for each machine, model and prompt length: what may be compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from textwrap import wrap

from hemiola.evidence.records import Claim, Figure, Mark, Record
from hemiola.evidence.svg import HEAD, rule, text

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 800, 340, 70, 250, 52, 56
LEGEND_LETTERS = 36  # that fit beside the plot
COLOURS = ("#1f6fb4", "#d1701b", "#3a8f3a", "#8a4fb0", "#b02020", "#68727c")
FIGURE = "time per step"

Lines = dict[str, dict[int, tuple[Claim, Figure]]]  # by engine, by batch size


def step_times(records: Sequence[Record]) -> Iterator[str]:
    """A point is hollow where it is UNGATED or UNSTEADY; a bar spans its repeats. What has no figure is not drawn."""
    plots: dict[tuple[str, ...], Lines] = {}
    for record in records:
        claim = record.claim
        figure = next((f for f in claim.figures if f.name == FIGURE and f.value is not None), None)
        if claim.kind != "bench" or figure is None or {Mark.VOID, Mark.PENDING} & set(claim.marks):
            continue
        prompts = f"prompts of {claim.workload['prompt_tokens']} tokens"
        title = f"{claim.model['name']}, {prompts}, {claim.machine['device']}"
        plot = plots.setdefault((title, claim.model["config_sha256"], *claim.model["stored"]), {})
        plot.setdefault(_engine(claim), {})[claim.workload["batch"]] = claim, figure
    for (title, *_), lines in plots.items():
        yield _draw(title, lines)


def _engine(claim: Claim) -> str:
    engine = claim.engine
    arms = "+".join(sorted(set(engine["arms"].values())))
    invariant = ", invariant" if engine.get("invariant") else ""
    return f"{arms}, {engine['dtype']}, KV {engine['kv_dtype']}{invariant}, {claim.code}"


def _draw(title: str, lines: Lines) -> str:
    batches = sorted({batch for line in lines.values() for batch in line})
    highest = max(f.high or f.value or 0.0 for line in lines.values() for _, f in line.values())
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    low, span = math.log2(batches[0]), math.log2(batches[-1] / batches[0])

    def x(batch: int) -> float:
        place = (math.log2(batch) - low) / span if span else 0.5
        return LEFT + 24 + (right - LEFT - 48) * place

    def y(value: float) -> float:
        return bottom - (bottom - TOP) * value / (1.05 * highest)

    parts = [
        f'<svg {HEAD} viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">',
        text(LEFT, 18, "Time per decode step, ms", size=14),
        text(LEFT, 36, title, colour="#68727c"),
    ]
    step = _round_step(highest)
    for tick in range(int(highest / step) + 1):
        parts += [
            rule(LEFT, y(tick * step), right, "#ddd"),
            text(LEFT - 8, y(tick * step) + 4, f"{tick * step:g}", "end"),
        ]
    parts += [text(x(batch), bottom + 18, str(batch), "middle") for batch in batches]
    parts.append(text((LEFT + right) / 2, bottom + 40, "batch size", "middle"))
    at = TOP + 12
    for index, (name, line) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        points = [(x(batch), figure, claim) for batch, (claim, figure) in sorted(line.items())]
        path = " ".join(f"{px:.1f},{y(figure.value or 0.0):.1f}" for px, figure, _ in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for px, figure, claim in points:
            if figure.low is not None and figure.high is not None:
                parts.append(f'<path d="M{px:.1f} {y(figure.low):.1f}V{y(figure.high):.1f}" stroke="{colour}"/>')
            is_sure = not {Mark.UNGATED, Mark.UNSTEADY} & set(claim.marks)
            fill = colour if is_sure else "#fff"
            centre = f'cx="{px:.1f}" cy="{y(figure.value or 0.0):.1f}"'
            parts.append(f'<circle {centre} r="4" fill="{fill}" stroke="{colour}" stroke-width="1.5"/>')
        for row in wrap(name, LEGEND_LETTERS):
            parts.append(text(right + 14, at, row, colour=colour))
            at += 16
        at += 6
    parts.append(text(right + 14, bottom - 4, "hollow: UNGATED or UNSTEADY", colour="#68727c", size=11))
    return "\n".join([*parts, "</svg>"])


def _round_step(highest: float) -> float:
    """1, 2 or 5 times a power of ten, so that there are four to ten of them."""
    power = 10.0 ** math.floor(math.log10(highest / 4))
    return next(power * factor for factor in (5, 2, 1) if power * factor <= highest / 4)
