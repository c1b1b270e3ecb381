"""The content of charts, for all renderers: values, colours, and the ends of the axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_adaptra.view.axis import number, round_up, ticks


class Series(NamedTuple):
    """A line over iterations: `values[i]` belongs to iteration i, in ms; None or NaN is a gap."""

    name: str
    values: Sequence[float | None]
    colour: str
    dashed: bool = False


class Mark(NamedTuple):
    """A mark shows an event at an iteration, such as a replan."""

    iteration: int
    title: str


def known(values: Sequence[float | None]) -> list[tuple[int, float]]:
    """Return index and value of the finite numbers among `values`."""
    return [(i, v) for i, v in enumerate(values) if v is not None and math.isfinite(v)]


def scale_top(series: Sequence[Series]) -> float:
    """Return the highest value after the first iteration, which pays for start-up; else of all."""
    points = [point for line in series for point in known(line.values)]
    later = [value for i, value in points if i > 0]
    return max(later or [value for _, value in points], default=0.0)


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
    """

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    x_names: Mapping[float, str] = field(default_factory=dict)
    note: str = ""

    def x_range(self) -> tuple[float, float]:
        """Return the ends of the x axis, with room on either side, so no dot stands on the edge."""
        xs = [x for curve in self.curves for x, _ in curve.points] + list(self.x_names)
        low, high = min(xs, default=0.0), max(xs, default=1.0)
        room = 0.05 * (high - low) or 0.5
        return low - room, high + room

    def top(self) -> float:
        """Return the end of the y axis, which starts at 0."""
        return round_up(1.02 * max((y for c in self.curves for _, y in c.points), default=0.0))

    def x_ticks(self) -> list[tuple[float, str]]:
        """Return value and label of each tick."""
        if self.x_names:
            return sorted(self.x_names.items())
        low, high = self.x_range()
        return [(tick, number(tick)) for tick in ticks(high, 8) if tick >= low]
