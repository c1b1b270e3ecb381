"""Charts as SVG: curves over iterations, or over a quantity such as activation budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_adaptra.view.axis import number, ticks
from megatron_adaptra.view.charts import Mark, XYChart
from megatron_adaptra.view.markup import element, label, picture, polyline, rule, text
from megatron_adaptra.view.theme import REPLAN, SLOW_PHASE

LEFT, RIGHT, TOP, BOTTOM = 52, 16, 26, 46  # pixels around the curves
CROWDED = 30  # points of a curve, from which on they are small

Place = Callable[[float], float]  # gives the pixel of a value


def xy_chart_svg(chart: XYChart, width: int = 620, height: int = 330) -> str:
    """The chart without its legend, for which see `curves_legend`; a dot shows its values.

    A triangle at the upper edge stands for a value beyond the scale. `width`, `height`: pixels.
    """
    low, high = chart.x_range()
    top, base = chart.top(), height - BOTTOM

    def at_x(x: float) -> float:
        return LEFT + (min(high, max(low, x)) - low) / (high - low) * (width - LEFT - RIGHT)

    def at_y(y: float) -> float:
        return base - (y / top if top else 0.0) * (base - TOP)

    parts = [element("title", text(chart.title)), *_phases(chart.phases, at_x, base)]
    for tick in ticks(top, 6):
        y = at_y(tick)
        parts.append(rule(LEFT, width - RIGHT, y, y, 0.3 if tick == 0 else 0.12))
        parts.append(label(number(tick), LEFT - 8, y + 4, "end"))
    for value, name in chart.x_ticks():
        x = at_x(value)
        parts += [rule(x, x, base, base + 4, 0.3), label(name, x, base + 18)]
    parts.append(label(chart.x_label, (LEFT + width - RIGHT) / 2, height - 6))
    parts.append(label(chart.y_label, 0, 12, "start"))
    parts += [_mark(mark, at_x(mark.x), base) for mark in chart.marks]
    for curve in chart.curves:
        points = curve.points
        if curve.joined and len(points) > 1:
            line = [(at_x(x), at_y(y)) for x, y in points if y <= top]
            parts.append(polyline(line, curve.colour, "5 4" if curve.dashed else None))
        radius = 5.0 if not curve.joined else 3.2 if len(points) < CROWDED else 1.8
        for x, y in points if curve.marked else ():
            words = f"{curve.name}\n{chart.x_label}: {number(x)}\n{chart.y_label}: {number(y)}"
            title = element("title", text(words))
            if y > top:
                d = f"M{at_x(x) - 4:.1f} {TOP + 7}h8l-4 -7z"
                parts.append(element("path", title, d=d, fill=curve.colour))
            else:
                at = {"cx": at_x(x), "cy": at_y(y)}
                parts.append(element("circle", title, **at, r=radius, fill=curve.colour))
    return picture(parts, width, height, "chart")


def _phases(phases: Mapping[str, tuple[int, int]], at_x: Place, base: int) -> list[str]:
    parts = []
    for name, (first, end) in phases.items():
        left, right = at_x(first - 0.5), at_x(end - 0.5)
        # A name for the whole run says nothing.
        if right <= left or (len(phases) == 1 and name != "slow"):
            continue
        if name == "slow":
            box = {"x": left, "y": TOP, "width": right - left, "height": base - TOP}
            parts.append(element("rect", **box, fill=SLOW_PHASE, fill_opacity=0.12))
        parts.append(label(name, (left + right) / 2, TOP - 6))
    return parts


def _mark(mark: Mark, x: float, base: int) -> str:
    line = {"x1": x, "x2": x, "y1": TOP, "y2": base, "stroke": REPLAN, "stroke_width": 1.4}
    return element(
        "g",
        element("title", text(mark.title)),
        element("line", **line, stroke_dasharray="4 3"),
        element("circle", cx=x, cy=TOP, r=3.5, fill=REPLAN),
    )
