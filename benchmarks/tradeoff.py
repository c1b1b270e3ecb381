"""The charts of `adaptra compare --out DIR` as a PNG: `python benchmarks/tradeoff.py DIR PNG`."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from gantt_png import INCHES, save, write_header

from megatron_adaptra.cli.compare_report import charts
from megatron_adaptra.cli.tradeoff import Cell, Comparison, Row
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.view.axis import number, ticks
from megatron_adaptra.view.charts import XYChart

HEAD, TALL, LEGEND = 1.55, 3.3, 1.35  # inches: above the charts, of them, below


def main(folder: str, png: str) -> None:
    """Raises ImportError where matplotlib is not installed."""
    data = json.loads(Path(folder, "compare.json").read_text())
    result, lead = comparison(data), f"Lower bound: {data['unlimited_bound_ms']:.0f} ms"
    drawn = charts(result)

    def draw(figure: Any, height: float) -> None:
        write_header(figure, height, "Every policy within every budget", lead)
        each = 1 / len(drawn)
        for i, chart in enumerate(drawn):
            left = i * each + 0.7 / INCHES
            right = (i + 1) * each - 0.25 / INCHES
            axes = figure.add_axes((left, LEGEND / height, right - left, TALL / height))
            draw_xy(axes, chart)
            handles, words = axes.get_legend_handles_labels()
            figure.legend(
                handles, words, loc="upper left", frameon=False, fontsize=8.5,
                bbox_to_anchor=(i * each + 0.3 / INCHES, (LEGEND - 0.6) / height),
                ncols=2 if max(map(len, words), default=0) > 22 else 3,
                columnspacing=1.4, borderaxespad=0,
            )  # fmt: skip

    save(png, HEAD + TALL + LEGEND, draw)


def comparison(data: dict[str, Any]) -> Comparison:
    """Read what `compare` has written."""

    def cell(it: dict[str, float] | None) -> Cell | None:
        return None if it is None else Cell(it["iteration_ms"] / 1e3, it["peak_in_flight"])

    rows = []
    for name, of in data["policies"].items():
        unlimited = cell(of["unlimited"])
        assert unlimited is not None
        rows.append(Row(name, unlimited, tuple(map(cell, of["within_budgets"]))))
    return Comparison(
        Conditions.from_json(data["conditions"]),
        tuple(math.inf if budget is None else budget for budget in data["budgets"]),
        data["unlimited_bound_ms"] / 1e3,
        tuple(ms / 1e3 for ms in data["lower_bounds_ms"]),
        tuple(rows),
        data["refused"],
        {name: tuple(times) for name, times in data["delay_tolerance"].items()},
    )


def draw_xy(axes: Any, chart: XYChart) -> None:
    """Draw the chart as `xy_chart_svg` does."""
    for curve in chart.curves:
        axes.plot(
            [x for x, _ in curve.points],
            [y for _, y in curve.points],
            color=curve.colour,
            linewidth=1.8 if curve.joined else 0,
            linestyle=(0, (4, 3)) if curve.dashed else "-",
            marker="o" if curve.marked else "",
            markersize=4.5 if curve.joined else 7,
            label=curve.name,
        )
    axes.set_xlim(*chart.x_range())
    axes.set_ylim(0, chart.top() or 1.0)
    axes.set_xticks([x for x, _ in chart.x_ticks()], [name for _, name in chart.x_ticks()])
    marks = ticks(chart.top(), 6)
    axes.set_yticks(marks, [number(mark) for mark in marks])
    axes.grid(axis="y", color="#e8ecf0", linewidth=0.8)
    axes.set_ylabel(chart.y_label, fontsize=8.5)
    axes.set_xlabel(chart.x_label, fontsize=8.5)
    axes.tick_params(length=0, labelsize=8)
    axes.set_axisbelow(True)
    axes.set_title(chart.title, loc="left", fontsize=10.5, fontweight="bold", pad=10)


if __name__ == "__main__":
    main(*sys.argv[1:])
