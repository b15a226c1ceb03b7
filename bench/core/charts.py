"""Figures, written as SVG by hand: a bar for each label."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from html import escape

WIDTH, HEIGHT = 640, 400
SIDE, TOP, BOTTOM = 20, 60, 50


@dataclasses.dataclass(frozen=True, slots=True)
class Bars:
    """Values with their bars from 0 on; `name` is that of the file."""

    name: str
    title: str
    values: Mapping[str, float]
    note: str = ""

    def __str__(self) -> str:
        width = (WIDTH - 2 * SIDE) / len(self.values)
        scale = (HEIGHT - TOP - BOTTOM) / (max(self.values.values()) or 1.0)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="sans-serif" font-size="11" text-anchor="middle">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            _text(WIDTH / 2, 22, self.title),
            _text(WIDTH / 2, HEIGHT - 10, self.note),
        ]
        for place, (label, value) in enumerate(self.values.items()):
            left, height = SIDE + width * (place + 0.2), scale * value
            top, middle = HEIGHT - BOTTOM - height, left + 0.3 * width
            parts += [
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{0.6 * width:.1f}" '
                f'height="{height:.1f}" fill="#4c72b0"/>',
                _text(middle, top - 5, f"{value:,.3g}"),
                _text(middle, HEIGHT - BOTTOM + 16, label),
            ]
        return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
