"""Curves over a quantity, such as iteration time over activation budget, as an SVG chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_adaptra.view.svg.axis import number, round_up, ticks
from megatron_adaptra.view.svg.markup import element, picture, text

LEFT, RIGHT, TOP, BOTTOM = 52, 16, 26, 46


class Curve(NamedTuple):
    """Points in the order of x. `joined`: by a line; `marked`: each with a dot."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    joined: bool = True
    marked: bool = True
    dashed: bool = False


@dataclass(frozen=True)
class XYChart:
    """`x_names`: the only ticks of the x axis, by value; empty for round values."""

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    x_names: Mapping[float, str] = field(default_factory=dict)
    note: str = ""

    def x_range(self) -> tuple[float, float]:
        """With some room to either side, so that no dot stands on the edge."""
        xs = [x for curve in self.curves for x, _ in curve.points] + list(self.x_names)
        low, high = min(xs, default=0.0), max(xs, default=1.0)
        room = 0.05 * (high - low) or 0.5
        return low - room, high + room

    def top(self) -> float:
        return round_up(1.02 * max((y for c in self.curves for _, y in c.points), default=0.0))

    def x_ticks(self) -> list[tuple[float, str]]:
        if self.x_names:
            return sorted(self.x_names.items())
        low, high = self.x_range()
        return [(tick, number(tick)) for tick in ticks(high, 8) if tick >= low]


def xy_chart_svg(chart: XYChart, width: int = 620, height: int = 330) -> str:
    """The chart without its legend, for which see `chart_legend`; a dot tells its values."""
    low, high = chart.x_range()
    top, base = chart.top(), height - BOTTOM

    def at_x(x: float) -> float:
        return LEFT + (x - low) / (high - low) * (width - LEFT - RIGHT)

    def at_y(y: float) -> float:
        return base - (y / top if top else 0.0) * (base - TOP)

    parts = [element("title", text(chart.title))]
    for tick in ticks(top, 6):
        y = at_y(tick)
        parts.append(_rule(LEFT, width - RIGHT, y, y, 0.3 if tick == 0 else 0.12))
        parts.append(_small(number(tick), LEFT - 8, y + 4, "end"))
    for value, name in chart.x_ticks():
        x = at_x(value)
        parts.append(_rule(x, x, base, base + 4, 0.3))
        parts.append(_small(name, x, base + 18, "middle"))
    parts.append(_small(chart.x_label, (LEFT + width - RIGHT) / 2, height - 6, "middle"))
    parts.append(_small(chart.y_label, 0, 12, "start"))
    for curve in chart.curves:
        points = curve.points
        if curve.joined and len(points) > 1:
            parts.append(
                element(
                    "polyline",
                    points=" ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in points),
                    fill="none",
                    stroke=curve.colour,
                    stroke_width=2,
                    stroke_linejoin="round",
                    stroke_dasharray="5 4" if curve.dashed else None,
                )
            )
        for x, y in points if curve.marked else ():
            words = f"{curve.name}\n{chart.x_label}: {number(x)}\n{chart.y_label}: {number(y)}"
            title = element("title", text(words))
            radius = 3.2 if curve.joined else 5.0
            parts.append(
                element("circle", title, cx=at_x(x), cy=at_y(y), r=radius, fill=curve.colour)
            )
    return picture(parts, width, height, "chart")


def chart_legend(curves: Sequence[Curve]) -> str:
    """Names and signs of the curves, as HTML that wraps where the page is narrow."""
    items = []
    for curve in curves:
        if curve.joined:
            style = f"border-color:{curve.colour}" + (";border-top-style:dashed" * curve.dashed)
            sign = element("i", class_="message", style=style)
        else:
            sign = element("i", class_="dot", style=f"background:{curve.colour}")
        items.append(element("span", sign, text(curve.name)))
    return element("p", *items, class_="legend")


def _rule(x1: float, x2: float, y1: float, y2: float, opacity: float) -> str:
    ends = {"x1": float(x1), "x2": float(x2), "y1": float(y1), "y2": float(y2)}
    return element("line", **ends, stroke="currentColor", stroke_opacity=opacity)


def _small(words: str, x: float, y: float, anchor: str) -> str:
    style = {"text_anchor": anchor, "font_size": 12, "fill_opacity": 0.75}
    return element("text", text(words), x=float(x), y=float(y), **style)
