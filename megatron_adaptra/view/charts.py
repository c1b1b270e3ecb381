"""The content of charts, for all renderers: values, colours, and the ends of the axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_adaptra.view.axis import number, round_up, ticks


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
