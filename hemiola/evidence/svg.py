"""The few shapes that the plots of evidence are made of, as SVG. Lengths in pixels."""

from __future__ import annotations

from html import escape

HEAD = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12" fill="#222"'


def text(x: float, y: float, content: str, anchor: str = "start", *, size: int = 12, colour: str = "#222") -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(content)}</text>'


def rule(left: float, y: float, right: float, colour: str) -> str:
    return f'<line x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{colour}"/>'
