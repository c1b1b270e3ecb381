"""Dot charts: several figures of each of several cases, one row per case, side by side in a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gantt_png import INCHES, save, write_header

HEAD, LEGEND = 1.55, 1.35  # inches above and below the charts


class Dots(NamedTuple):
    """`values[i]` belongs to row i. A bar is an upright stroke."""

    name: str
    colour: str
    values: Sequence[float]
    bar: bool = False


class DotChart(NamedTuple):
    """`x_label`: with its unit. `rows`: names of the cases, from the top. `start`: of the axis."""

    title: str
    x_label: str
    rows: Sequence[str]
    series: Sequence[Dots]
    start: float = 0.0


def dots_png(path: Path, headline: str, lead: str, charts: Sequence[DotChart]) -> None:
    """Raises ImportError where matplotlib is not installed."""
    tall = max(3.3, 0.27 * max(len(chart.rows) for chart in charts))

    def fill(figure: Any, height: float) -> None:
        write_header(figure, height, headline, lead)
        each = 1 / len(charts)
        for i, chart in enumerate(charts):
            left = i * each + (0.7 + 0.075 * max(map(len, chart.rows))) / INCHES
            right = (i + 1) * each - 0.25 / INCHES
            axes = figure.add_axes((left, LEGEND / height, right - left, tall / height))
            draw(axes, chart)
            figure.legend(
                *axes.get_legend_handles_labels(), loc="upper left", ncols=2, frameon=False,
                bbox_to_anchor=(i * each + 0.3 / INCHES, (LEGEND - 0.6) / height), fontsize=8.5,
                columnspacing=1.4, borderaxespad=0,
            )  # fmt: skip

    save(path, HEAD + tall + LEGEND, fill)


def draw(axes: Any, chart: DotChart) -> None:
    for i, inside in enumerate(zip(*(dots.values for dots in chart.series), strict=True)):
        axes.plot([min(inside), max(inside)], [i, i], color="#ccd4db", linewidth=1, zorder=1)
    for dots in chart.series:
        marker = "|" if dots.bar else "o"
        axes.scatter(
            dots.values, range(len(dots.values)), color=dots.colour, marker=marker,
            s=120 if dots.bar else 34, linewidths=2.4 if dots.bar else 0, label=dots.name, zorder=2,
            clip_on=False,
        )  # fmt: skip
    most = max(value for dots in chart.series for value in dots.values)
    axes.set_xlim(chart.start, chart.start + 1.04 * (most - chart.start))
    axes.set_ylim(len(chart.rows) - 0.4, -0.6)
    axes.set_yticks(range(len(chart.rows)), list(chart.rows))
    axes.grid(axis="x", color="#e8ecf0", linewidth=0.8)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(chart.x_label, fontsize=8.5)
    axes.tick_params(length=0, labelsize=8)
    axes.set_axisbelow(True)
    axes.set_title(chart.title, loc="left", fontsize=10.5, fontweight="bold", pad=10)
