"""Latencies as distributions in one SVG: for each kind, which part of the values is below a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

_WIDTH, _HEIGHT, _LEFT, _TOP = 640, 320, 56, 16
_COLOURS = {"first_token": "#1b6ca8", "between_pieces": "#2a9d4b", "per_token": "#8a5cc2", "end_to_end": "#c2571a"}


def render_svg(latencies: Mapping[str, Sequence[float]]) -> str:
    """latencies: sorted seconds by kind. The time axis is logarithmic, in milliseconds."""
    shown = {name: [max(value * 1000, 1e-3) for value in latencies[name]] for name in _COLOURS if latencies.get(name)}
    low = min((values[0] for values in shown.values()), default=1.0)
    high = max((values[-1] for values in shown.values()), default=10.0)
    first, last = math.floor(math.log10(low)), max(math.ceil(math.log10(high)), math.floor(math.log10(low)) + 1)

    def x(milliseconds: float) -> float:
        return _LEFT + (math.log10(milliseconds) - first) / (last - first) * _WIDTH

    def y(part: float) -> float:
        return _TOP + (1 - part) * _HEIGHT

    lines = []
    for power in range(first, last + 1):
        place, label = x(10.0**power), f"{10.0**power:g}"
        lines.append(f'<path d="M{place:.1f} {_TOP}V{_TOP + _HEIGHT}" stroke="#ddd"/>')
        lines.append(f'<text x="{place:.1f}" y="{_TOP + _HEIGHT + 16}" text-anchor="middle">{label}</text>')
    for part in (0, 0.5, 0.9, 0.99):
        lines.append(f'<path d="M{_LEFT} {y(part):.1f}H{_LEFT + _WIDTH}" stroke="#ddd"/>')
        lines.append(f'<text x="{_LEFT - 6}" y="{y(part) + 4:.1f}" text-anchor="end">{part:g}</text>')
    for row, (name, values) in enumerate(shown.items()):
        colour, label = _COLOURS[name], f"{name.replace('_', ' ')} ({len(values)})"
        points = [f"L{x(value):.1f} {y((i + 1) / len(values)):.1f}" for i, value in enumerate(values)]
        lines.append(f'<path d="M{x(values[0]):.1f} {y(0):.1f}{"".join(points)}" fill="none" stroke="{colour}"/>')
        lines.append(f'<text x="{_LEFT + 8}" y="{_TOP + 16 + 16 * row}" fill="{colour}">{label}</text>')
    width, height = _LEFT + _WIDTH + 24, _TOP + _HEIGHT + 40
    caption = f'<text x="{_LEFT + _WIDTH / 2}" y="{height - 6}" text-anchor="middle">milliseconds</text>'
    style = 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {style}>'
    return "\n".join([head, *lines, caption, "</svg>"]) + "\n"
