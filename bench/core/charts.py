"""Two kinds of figures, written as SVG by hand: bars, and lines with intervals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 70
COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c")
# (x, y, lower and upper end of y's interval)
Point = tuple[float, float, float, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Bars:
    """A bar for each label; `name` is that of the file."""

    name: str
    title: str
    y: str
    values: Mapping[str, float]
    note: str = ""

    def __str__(self) -> str:
        top, step = _scale(max(self.values.values()))
        width = (WIDTH - LEFT - RIGHT) / len(self.values)
        parts = [*_axes(self.title, self.note, self.y, 0.0, top, step)]
        for place, (label, value) in enumerate(self.values.items()):
            middle, height = LEFT + width * (place + 0.5), _height(value, 0.0, top)
            parts.append(
                f'<rect x="{middle - 0.3 * width:.1f}" y="{height:.1f}" width="{0.6 * width:.1f}" '
                f'height="{HEIGHT - BOTTOM - height:.1f}" fill="{COLOURS[0]}"/>'
            )
            parts.append(_text(middle, height - 5, f"{value:,.3g}"))
            parts.append(_text(middle, HEIGHT - BOTTOM + 16, label))
        return _document(parts)


@dataclasses.dataclass(frozen=True, slots=True)
class Lines:
    """A line for each name through points (x, y, low, high), whose intervals are drawn."""

    name: str
    title: str
    x: str
    y: str
    series: Mapping[str, Sequence[Point]]
    note: str = ""

    def __str__(self) -> str:
        points = [point for series in self.series.values() for point in series]
        right, x_step = _scale(max(point[0] for point in points))
        bottom = min(0.0, *(point[2] for point in points))
        top, step = _scale(max(point[3] for point in points))
        parts = [*_axes(self.title, self.note, self.y, bottom, top, step)]
        for number in range(int(right / x_step) + 1):
            across = LEFT + (WIDTH - LEFT - RIGHT) * number * x_step / right
            parts.append(_text(across, HEIGHT - BOTTOM + 16, f"{number * x_step:g}"))
        parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 34, self.x))
        for place, (label, series) in enumerate(self.series.items()):
            colour = COLOURS[place % len(COLOURS)]
            places = [
                (
                    LEFT + (WIDTH - LEFT - RIGHT) * point[0] / right,
                    *(_height(value, bottom, top) for value in point[1:]),
                )
                for point in sorted(series)
            ]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y, *_ in places)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>')
            for x, y, low, high in places:
                parts.append(
                    f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="{colour}" opacity="0.5"/>'
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
                )
            parts.append(_text(WIDTH - RIGHT - 4, TOP + 14 * (place + 1), label, colour, "end"))
        return _document(parts)


def _scale(most: float) -> tuple[float, float]:
    """The end of an axis from 0, and the distance of its marks: 1, 2 or 5 times a power of 10."""
    most = most if most > 0 else 1.0
    power = 10.0 ** math.floor(math.log10(most / 4))
    step = next(power * times for times in (1, 2, 5, 10) if power * times * 5 >= most)
    return step * math.ceil(most / step * 1.05), step


def _height(value: float, bottom: float, top: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (top - value) / (top - bottom)


def _axes(title: str, note: str, y: str, bottom: float, top: float, step: float) -> Iterator[str]:
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    yield _text(WIDTH / 2, 22, title, size=14)
    yield _text(WIDTH / 2, HEIGHT - 10, note, "#666666")
    middle = (TOP + HEIGHT - BOTTOM) / 2
    yield f'<g transform="rotate(-90 16 {middle})">{_text(16, middle, y)}</g>'
    for number in range(math.ceil(bottom / step), int(top / step) + 1):
        at = _height(number * step, bottom, top)
        yield f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>'
        yield _text(LEFT - 6, at + 4, f"{number * step:g}", anchor="end")


def _text(
    x: float, y: float, text: str, colour: str = "black", anchor: str = "middle", size: int = 11
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}" '
        f'font-size="{size}">{escape(text)}</text>'
    )


def _document(parts: Sequence[str]) -> str:
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif">'
    )
    return "\n".join([opening, *parts, "</svg>", ""])
