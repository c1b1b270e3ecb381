"""Several figures of each of several cases, as a dot chart: one row per case."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_adaptra.view.svg.axis import number, ticks
from megatron_adaptra.view.svg.markup import element, picture, text

RIGHT, TOP, BOTTOM, ROW = 18, 8, 44, 23


class Dots(NamedTuple):
    """`values[i]` belongs to row i; None where there is none. A bar is an upright stroke."""

    name: str
    colour: str
    values: Sequence[float | None]
    bar: bool = False


@dataclass(frozen=True)
class DotChart:
    title: str
    x_label: str
    rows: Sequence[str]
    series: Sequence[Dots]
    start: float = 0.0  # of the axis
    note: str = ""

    def end(self) -> float:
        values = [v for dots in self.series for v in dots.values if v is not None]
        return self.start + 1.04 * max((v - self.start for v in values), default=0.0) or 1.0

    def marks(self) -> list[float]:
        """Round values of the axis."""
        step = ticks(self.end() - self.start, 6)
        first = math.ceil(self.start / step[1] - 1e-9) * step[1] if len(step) > 1 else 0.0
        return [first + tick for tick in step if first + tick <= self.end() * (1 + 1e-9)]


def dot_chart_svg(chart: DotChart, width: int = 620) -> str:
    """The chart without its legend, for which see `dots_legend`; a dot tells its value."""
    left = 16 + 6.4 * max(map(len, chart.rows), default=0)
    base = TOP + ROW * len(chart.rows)
    start, end = chart.start, chart.end()

    def at_x(value: float) -> float:
        return left + (value - start) / (end - start) * (width - left - RIGHT)

    parts = [element("title", text(chart.title))]
    for tick in chart.marks():
        x = at_x(tick)
        line = {"stroke": "currentColor", "stroke_opacity": 0.12}
        parts.append(element("line", x1=x, x2=x, y1=TOP, y2=base + 4, **line))
        parts.append(_small(number(tick), x, base + 19, "middle"))
    parts.append(_small(chart.x_label, (left + width - RIGHT) / 2, base + 38, "middle"))
    for i, name in enumerate(chart.rows):
        y = TOP + ROW * (i + 0.5)
        inside = [dots.values[i] for dots in chart.series]
        found = [at_x(v) for v in inside if v is not None]
        parts.append(_small(name, left - 10, y + 4, "end"))
        if found:
            line = {"stroke": "currentColor", "stroke_opacity": 0.22}
            parts.append(element("line", x1=min(found), x2=max(found), y1=y, y2=y, **line))
        parts += [
            _sign(dots, i, name, at_x, y) for dots in chart.series if dots.values[i] is not None
        ]
    return picture(parts, width, base + BOTTOM, "chart")


def _sign(dots: Dots, row: int, name: str, at_x: Callable[[float], float], y: float) -> str:
    value = dots.values[row] or 0.0
    title = element("title", text(f"{name}\n{dots.name}: {number(value)}"))
    x = at_x(value)
    if dots.bar:
        size = {"width": 3, "height": 15, "rx": 1}
        return element("rect", title, x=x - 1.5, y=y - 7.5, fill=dots.colour, **size)
    return element("circle", title, cx=x, cy=y, r=4.6, fill=dots.colour, fill_opacity=0.9)


def dots_legend(series: Sequence[Dots]) -> str:
    """Names and signs, as HTML that wraps where the page is narrow."""
    items = [
        element(
            "span",
            element("i", class_="bar" if d.bar else "dot", style=f"background:{d.colour}"),
            text(d.name),
        )
        for d in series
    ]
    return element("p", *items, class_="legend")


def _small(words: str, x: float, y: float, anchor: str) -> str:
    style = {"text_anchor": anchor, "font_size": 12, "fill_opacity": 0.8}
    return element("text", text(words), x=float(x), y=float(y), **style)
