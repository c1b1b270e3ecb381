"""Charts as SVG: values over iterations, and curves over a quantity such as activation budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_adaptra.view.axis import number, round_up, ticks
from megatron_adaptra.view.charts import Mark, Series, XYChart, known, scale_top
from megatron_adaptra.view.markup import element, label, picture, polyline, rule, text
from megatron_adaptra.view.theme import REPLAN, SLOW_PHASE

LEFT, RIGHT, TOP, BOTTOM = 46, 12, 50, 34  # pixels around values over iterations
XY_LEFT, XY_RIGHT, XY_TOP, XY_BOTTOM = 52, 16, 26, 46  # and around curves


def line_chart_svg(
    series: Sequence[Series],
    *,
    phases: Mapping[str, tuple[int, int]] | None = None,
    marks: Sequence[Mark] = (),
    title: str = "",
    width: int = 640,
    height: int = 290,
) -> str:
    """Lines over iterations, with a legend.

    The first iteration pays for start-up, so it does not stretch the scale: where it lies beyond, a
    triangle at the upper edge stands for it.

    Args:
        series: one line each, in ms.
        phases: by name, the first iteration and the one after the last; each is named, and "slow"
            is shaded.
        marks: dashed verticals.
        title: shown when pointed at.
        width, height: of the picture, in pixels.
    """
    return _Chart(series, phases or {}, marks, title, width, height).svg()


class _Chart:
    def __init__(
        self,
        series: Sequence[Series],
        phases: Mapping[str, tuple[int, int]],
        marks: Sequence[Mark],
        title: str,
        width: int,
        height: int,
    ) -> None:
        self.series, self.phases, self.marks = series, phases, marks
        self.title = title
        self.width, self.height, self.base = width, height, height - BOTTOM
        self.count = max([len(line.values) for line in series] + [2])
        self.top = round_up(1.04 * scale_top(series))

    def x(self, iteration: float) -> float:
        share = min(1.0, max(0.0, iteration / (self.count - 1)))
        return LEFT + share * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return self.base - value / self.top * (self.base - TOP)

    def svg(self) -> str:
        parts = [element("title", text(self.title or "values over iterations"))]
        parts += self.background() + self.axes()
        for mark in self.marks:
            parts.append(self.mark(mark))
        for line in self.series:
            parts += self.line(line)
        parts += self.legend()
        return picture(parts, self.width, self.height, "chart")

    def background(self) -> list[str]:
        parts = []
        for name, (first, end) in self.phases.items():
            if len(self.phases) == 1 and name != "slow":
                continue  # a name for the whole run says nothing
            left, right = self.x(first - 0.5 if first else 0), self.x(end - 0.5)
            if right <= left:
                continue
            if name == "slow":
                parts.append(
                    element(
                        "rect",
                        x=left,
                        y=TOP,
                        width=right - left,
                        height=self.base - TOP,
                        fill=SLOW_PHASE,
                        fill_opacity=0.12,
                    )
                )
            parts.append(label(name, (left + right) / 2, TOP - 6))
        return parts

    def axes(self) -> list[str]:
        parts = []
        for tick in ticks(self.top, 5):
            y = self.y(tick)
            parts.append(rule(LEFT, self.width - RIGHT, y, y, 0.3 if tick == 0 else 0.12))
            parts.append(label(number(tick), LEFT - 7, y + 4, "end"))
        for tick in ticks(self.count - 1, 8):
            if tick == int(tick):
                parts.append(label(number(tick), self.x(tick), self.base + 16))
        parts.append(label("iteration", (LEFT + self.width - RIGHT) / 2, self.height - 4))
        parts.append(label("ms", LEFT - 7, TOP - 12, "end"))
        return parts

    def mark(self, mark: Mark) -> str:
        x = self.x(mark.iteration)
        return element(
            "g",
            element("title", text(mark.title)),
            element(
                "line",
                x1=x,
                x2=x,
                y1=TOP,
                y2=self.base,
                stroke=REPLAN,
                stroke_width=1.4,
                stroke_dasharray="4 3",
            ),
            element("circle", cx=x, cy=TOP, r=3.5, fill=REPLAN),
        )

    def line(self, line: Series) -> list[str]:
        points = known(line.values)
        inside = [(self.x(i), self.y(v)) for i, v in points if v <= self.top]
        parts = [polyline(inside, line.colour, "5 3" if line.dashed else None)]
        for i, value in points:
            x, y = self.x(i), self.y(min(value, self.top))
            title = element("title", text(f"{line.name}, iteration {i}: {number(value)} ms"))
            if value > self.top:
                d = f"M{x - 4:.1f} {y + 7:.1f}h8l-4 -7z"
                parts.append(element("path", title, d=d, fill=line.colour))
            else:
                radius = 2.2 if self.count <= 80 else 1.2
                parts.append(element("circle", title, cx=x, cy=y, r=radius, fill=line.colour))
        return parts

    def legend(self) -> list[str]:
        parts, x = [], float(LEFT)
        entries = [(line.name, line.colour, line.dashed) for line in self.series]
        if self.marks:
            entries.append(("replan", REPLAN, True))
        for name, colour, dashed in dict.fromkeys(entries):
            parts.append(
                element(
                    "line",
                    x1=x,
                    x2=x + 20,
                    y1=14,
                    y2=14,
                    stroke=colour,
                    stroke_width=2.5,
                    stroke_dasharray="5 3" if dashed else None,
                )
            )
            parts.append(element("text", text(name), x=x + 26, y=18, font_size=12.5))
            x += 48 + 7 * len(name)
        return parts


def xy_chart_svg(chart: XYChart, width: int = 620, height: int = 330) -> str:
    """The chart without its legend, for which see `curves_legend`; a dot shows its values.

    `width`, `height`: pixels.
    """
    low, high = chart.x_range()
    top, base = chart.top(), height - XY_BOTTOM

    def at_x(x: float) -> float:
        return XY_LEFT + (x - low) / (high - low) * (width - XY_LEFT - XY_RIGHT)

    def at_y(y: float) -> float:
        return base - (y / top if top else 0.0) * (base - XY_TOP)

    parts = [element("title", text(chart.title))]
    for tick in ticks(top, 6):
        y = at_y(tick)
        parts.append(rule(XY_LEFT, width - XY_RIGHT, y, y, 0.3 if tick == 0 else 0.12))
        parts.append(label(number(tick), XY_LEFT - 8, y + 4, "end"))
    for value, name in chart.x_ticks():
        x = at_x(value)
        parts += [rule(x, x, base, base + 4, 0.3), label(name, x, base + 18)]
    parts.append(label(chart.x_label, (XY_LEFT + width - XY_RIGHT) / 2, height - 6))
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
