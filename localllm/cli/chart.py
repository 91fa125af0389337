"""Charts of loss over file size with logarithmic axes, for the terminal or as an SVG file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from localllm.console import quantity
from localllm.errors import UsageError

#: Size of the drawing in a terminal, in characters.
_COLUMNS, _LINES = 60, 10
#: Size of the SVG file and its margins, in pixels.
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 400, 70, 30, 40, 50
_COLOURS = ("#2a6fbb", "#c8501e", "#2f8f4e", "#8a4fb3")


class Point(NamedTuple):
    """A file's size in bytes, loss and name."""

    size: float
    loss: float
    name: str = ""


class _Field:
    """Scales points to coordinates from 0 to 1."""

    def __init__(self, points: Sequence[Point]) -> None:
        sizes, losses = [math.log(p.size) for p in points], [math.log(p.loss) for p in points]
        self.smallest, self.largest, self.least, self.most = min(sizes), max(sizes), min(losses), max(losses)

    def across(self, size: float) -> float:
        return (math.log(size) - self.smallest) / ((self.largest - self.smallest) or 1)

    def down(self, loss: float) -> float:
        return (self.most - math.log(loss)) / ((self.most - self.least) or 1)


def point_label(i: int) -> str:
    """Return the label of the i-th file in `text_chart`."""
    return chr(ord("a") + i % 26)


def text_chart(points: Sequence[Point]) -> list[str]:
    """Return a chart as lines for a terminal, with a `point_label` per point; empty if it would be trivial."""
    drawable = [point for point in points if point.size > 0 < point.loss]
    if len(drawable) < 2:
        return []
    field = _Field(drawable)
    cells = [[" "] * _COLUMNS for _ in range(_LINES)]
    for i, point in enumerate(points):
        if point in drawable:
            line = cells[round((_LINES - 1) * field.down(point.loss))]
            line[round((_COLUMNS - 1) * field.across(point.size))] = point_label(i)
    labels = {0: f"{math.exp(field.most):.3g}", _LINES - 1: f"{math.exp(field.least):.3g}"}
    lines = [f"{labels.get(row, ''):>9} │{''.join(line).rstrip()}" for row, line in enumerate(cells)]
    ends = quantity(math.exp(field.smallest), "B"), quantity(math.exp(field.largest), "B")
    return ["", "KL", *lines, f"{'':>9} └{'─' * _COLUMNS}", f"{'':>11}{ends[0]}{ends[1]:>{_COLUMNS - len(ends[0])}}"]


def svg_chart(series: dict[str, Sequence[Point]]) -> str:
    """Return an SVG document.  Several series are drawn as named lines, a single series as points."""
    from html import escape  # imported here: `localllm --help` reads every command

    drawable = [point for points in series.values() for point in points if point.size > 0 < point.loss]
    if not drawable:
        raise UsageError("there is no loss to draw: all models are equal to the first one")
    field = _Field(drawable)

    def x(size: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (0.03 + 0.85 * field.across(size))

    def y(loss: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (0.05 + 0.9 * field.down(loss))

    def text(x: float, y: float, words: str, more: str = "") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" {more}>{escape(words)}</text>'

    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    drawn = [text(_LEFT, 20, "Kullback-Leibler divergence (nats a token) over the size of the file")]
    for loss in _round_numbers(field.least, field.most):
        drawn.append(f'<path d="M{_LEFT} {y(loss):.0f}H{right}" stroke="#ddd"/>')
        drawn.append(text(_LEFT - 8, y(loss) + 4, f"{loss:g}", 'text-anchor="end"'))
    for size in sorted({point.size for point in drawable})[::2]:
        drawn.append(f'<path d="M{x(size):.0f} {bottom}v5" stroke="#444"/>')
        drawn.append(text(x(size), bottom + 20, quantity(size, "B"), 'text-anchor="middle"'))
    drawn.append(f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#444"/>')
    for (name, points), colour in zip(series.items(), _COLOURS, strict=False):
        places = [(x(p.size), y(p.loss), p.name) for p in sorted(points) if p in drawable]
        if len(series) > 1:
            path = " ".join(f"{'L' if i else 'M'}{px:.0f} {py:.0f}" for i, (px, py, _) in enumerate(places))
            drawn.append(f'<path d="{path}" fill="none" stroke="{colour}"/>')
            at = _TOP + 16 * (1 + list(series).index(name))
            drawn.append(text(right, at, name, f'text-anchor="end" fill="{colour}"'))
        for px, py, words in places:
            drawn.append(f'<circle cx="{px:.0f}" cy="{py:.0f}" r="4" fill="{colour}"/>')
            drawn.append(text(px + 8, py - 5, words))
    style = 'font-family="sans-serif" font-size="12" fill="#222"'
    box = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    ground = f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="8" fill="#fff"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {box} {style}>', ground, *drawn, "</svg>\n"])


def _round_numbers(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten between ``low`` and ``high``, which are logarithms."""
    powers = range(math.floor(low / math.log(10)), math.ceil(high / math.log(10)) + 1)
    numbers = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    return [number for number in numbers if low <= math.log(number) <= high]
