"""The relative error per layer as one SVG file, on a logarithmic scale. Written by hand, like the simulator's plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hemiola.evidence.svg import HEAD, rule, text
from hemiola.evidence.trace import Difference, TraceResult

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 960, 420, 80, 150, 56, 64  # pixels
LINES = (("outputs", "#1f6fb4"), ("states and KV", "#d1701b"))
LOWEST, HIGHEST = -18, 4  # decades that an axis may reach: what is beyond is drawn at its edge


def render_svg(result: TraceResult) -> str:
    """The whole file. A value of 0 lies on the lower edge, an infinite one on the upper edge; the bound is dashed."""
    layers = [(layer, kind, found) for layer, kind, found in result.layers() if found]
    errors = [[_worst(found, is_state) for _, _, found in layers] for is_state in (False, True)]
    bounds = [max(d.bound for d in found) for _, _, found in layers]
    low, high = _decades([*bounds, *(e for line in errors for e in line if e is not None)])
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x(index: int) -> float:
        return LEFT + (right - LEFT) * (index + 0.5) / len(layers)

    def y(error: float) -> float:
        place = low if error <= 0 else high if not math.isfinite(error) else math.log10(error)
        return bottom - (bottom - TOP) * (min(max(place, low), high) - low) / (high - low)

    parts = [
        f'<svg {HEAD} viewBox="0 0 {WIDTH} {HEIGHT}"><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        text(LEFT, 24, "Relative error per layer: the largest of all its values and steps", size=15),
    ]
    for decade in range(low, high + 1, max(1, (high - low) // 8)):
        parts.append(rule(LEFT, y(10.0**decade), right, "#ddd"))
        parts.append(text(LEFT - 8, y(10.0**decade) + 4, f"1e{decade}", anchor="end"))
    every = -(-len(layers) // 27)
    for index, (layer, kind, _) in enumerate(layers):
        if kind in ("embedding", "head") or index % every == 0:
            name = {"embedding": "in", "head": "out"}.get(kind, str(layer))
            parts.append(text(x(index), bottom + 18, name, "middle"))
    parts.append(_path(bounds, x, y, "#888", "5 4"))
    parts.append(text(right + 12, TOP + 4, "bound (dashed)", colour="#888"))
    for number, ((name, colour), line) in enumerate(zip(LINES, errors, strict=True)):
        parts += [
            f'<circle cx="{x(i):.1f}" cy="{y(e):.1f}" r="3.5" fill="{colour}"/>'
            for i, e in enumerate(line)
            if e is not None
        ]
        if not number:
            parts.append(_path([e or 0.0 for e in line], x, y, colour))
        parts.append(text(right + 12, TOP + 26 + 18 * number, name, colour=colour))
    first = result.first
    if first is not None:
        index = next(i for i, (layer, _, _) in enumerate(layers) if layer == first.site.layer)
        parts.append(
            f'<line x1="{x(index):.1f}" x2="{x(index):.1f}" y1="{TOP}" y2="{bottom}" stroke="#b02020"/>'
            + text(x(index), TOP - 8, f"first: {first.op} {first.site.part}", "middle", colour="#b02020")
        )
    parts.append(text((LEFT + right) / 2, bottom + 42, "layer", "middle"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _worst(differences: Sequence[Difference], is_state: bool) -> float | None:
    return max((d.error for d in differences if d.is_state == is_state), default=None)


def _decades(errors: Sequence[float]) -> tuple[int, int]:
    exponents = [math.log10(e) for e in errors if 0 < e < math.inf]
    if not exponents:
        return -8, 0
    low, high = math.floor(min(exponents)) - 1, max(0, math.ceil(max(exponents)))
    return max(low, LOWEST), min(high, HIGHEST)


def _path(
    values: Sequence[float],
    x: Callable[[int], float],
    y: Callable[[float], float],
    colour: str,
    dash: str = "none",
) -> str:
    points = " ".join(f"{x(i):.1f},{y(value):.1f}" for i, value in enumerate(values))
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5" stroke-dasharray="{dash}"/>'
