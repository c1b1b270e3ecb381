"""Curves over a quantity, such as iteration time over activation budget, as SVG."""

from __future__ import annotations

from megatron_adaptra.view.axis import number, ticks
from megatron_adaptra.view.charts import XYChart
from megatron_adaptra.view.markup import element, label, picture, polyline, rule, text

LEFT, RIGHT, TOP, BOTTOM = 52, 16, 26, 46  # pixels


def xy_chart_svg(chart: XYChart, width: int = 620, height: int = 330) -> str:
    """The chart without its legend, for which see `curves_legend`; a dot shows its values.

    `width`, `height`: pixels.
    """
    low, high = chart.x_range()
    top, base = chart.top(), height - BOTTOM

    def at_x(x: float) -> float:
        return LEFT + (x - low) / (high - low) * (width - LEFT - RIGHT)

    def at_y(y: float) -> float:
        return base - (y / top if top else 0.0) * (base - TOP)

    parts = [element("title", text(chart.title))]
    for tick in ticks(top, 6):
        y = at_y(tick)
        parts.append(rule(LEFT, width - RIGHT, y, y, 0.3 if tick == 0 else 0.12))
        parts.append(label(number(tick), LEFT - 8, y + 4, "end"))
    for value, name in chart.x_ticks():
        x = at_x(value)
        parts += [rule(x, x, base, base + 4, 0.3), label(name, x, base + 18)]
    parts.append(label(chart.x_label, (LEFT + width - RIGHT) / 2, height - 6))
    parts.append(label(chart.y_label, 0, 12, "start"))
    for curve in chart.curves:
        points = curve.points
        if curve.joined and len(points) > 1:
            line = [(at_x(x), at_y(y)) for x, y in points]
            parts.append(polyline(line, curve.colour, "5 4" if curve.dashed else None))
        for x, y in points if curve.marked else ():
            words = f"{curve.name}\n{chart.x_label}: {number(x)}\n{chart.y_label}: {number(y)}"
            title = element("title", text(words))
            radius = 3.2 if curve.joined else 5.0
            parts.append(
                element("circle", title, cx=at_x(x), cy=at_y(y), r=radius, fill=curve.colour)
            )
    return picture(parts, width, height, "chart")
