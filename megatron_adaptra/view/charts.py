"""Charts over iterations, or over a quantity such as activation budget, and their SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_adaptra.view.axis import number, round_up, ticks
from megatron_adaptra.view.markup import element, label, picture, polyline, rule, text
from megatron_adaptra.view.theme import REPLAN, SLOW_PHASE

LEFT, RIGHT, TOP, BOTTOM = 52, 16, 26, 46  # pixels around the curves
CROWDED = 30  # points of a curve, from which on they are small

Place = Callable[[float], float]  # gives the pixel of a value


class Mark(NamedTuple):
    """A mark shows an event at `x`, such as a replan."""

    x: float
    title: str


class Curve(NamedTuple):
    """Points (x, y) in the order of x. `joined`: by a line; `marked`: each with a dot."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    joined: bool = True
    marked: bool = True
    dashed: bool = False


@dataclass(frozen=True)
class XYChart:
    """Curves on two axes; the y axis starts at 0.

    Args:
        title: above the chart.
        x_label, y_label: of the axes, with units.
        curves: in the order of the legend.
        x_names: the only ticks of the x axis, by value; empty for round values.
        note: a sentence beneath the title; empty for none.
        phases: by name, the first x and the one after the last; "slow" is shaded.
        marks: dashed verticals.
        start_up: points at 0 pay for start-up, and do not stretch the y axis.
    """

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    x_names: Mapping[float, str] = field(default_factory=dict)
    note: str = ""
    phases: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    marks: Sequence[Mark] = ()
    start_up: bool = False

    def x_range(self) -> tuple[float, float]:
        """Return the ends of the x axis, with room on either side, so no dot stands on the edge."""
        xs = [x for curve in self.curves for x, _ in curve.points] + list(self.x_names)
        low, high = min(xs, default=0.0), max(xs, default=1.0)
        room = 0.05 * (high - low) or 0.5
        return low - room, high + room

    def top(self) -> float:
        """Return the end of the y axis, which starts at 0."""
        points = [point for curve in self.curves for point in curve.points]
        later = [point for point in points if self.start_up and point[0] > 0]
        return round_up(1.02 * max((y for _, y in later or points), default=0.0))

    def x_ticks(self) -> list[tuple[float, str]]:
        """Return value and label of each tick."""
        if self.x_names:
            return sorted(self.x_names.items())
        low, high = self.x_range()
        return [(tick, number(tick)) for tick in ticks(high, 8) if tick >= low]


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
