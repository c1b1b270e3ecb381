"""A dot chart as SVG: one row per case."""

from __future__ import annotations

from collections.abc import Callable

from megatron_adaptra.view.axis import number
from megatron_adaptra.view.charts import DotChart, Dots
from megatron_adaptra.view.markup import element, picture, text
from megatron_adaptra.view.svg.parts import label, rule

RIGHT, TOP, BOTTOM, ROW = 18, 8, 44, 23  # pixels


def dot_chart_svg(chart: DotChart, width: int = 620) -> str:
    """The chart without its legend, for which see `dots_legend`; a dot shows its value.

    `width`: pixels; the height follows from the rows.
    """
    left = 16 + 6.4 * max(map(len, chart.rows), default=0)
    base = TOP + ROW * len(chart.rows)
    start, end = chart.start, chart.end()

    def at_x(value: float) -> float:
        return left + (value - start) / (end - start) * (width - left - RIGHT)

    parts = [element("title", text(chart.title))]
    for tick in chart.marks():
        x = at_x(tick)
        parts += [rule(x, x, TOP, base + 4), label(number(tick), x, base + 19)]
    parts.append(label(chart.x_label, (left + width - RIGHT) / 2, base + 38))
    for i, name in enumerate(chart.rows):
        y = TOP + ROW * (i + 0.5)
        inside = [dots.values[i] for dots in chart.series]
        found = [at_x(v) for v in inside if v is not None]
        parts.append(label(name, left - 10, y + 4, "end"))
        if found:
            parts.append(rule(min(found), max(found), y, y, 0.22))
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
