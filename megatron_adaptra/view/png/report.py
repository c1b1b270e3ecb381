"""The report as one PNG, for places that show no HTML: a README, a chat, a slide."""

from __future__ import annotations

import os
from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from megatron_adaptra.view import findings, reductions, share_decisions
from megatron_adaptra.view.axis import number, round_up, ticks
from megatron_adaptra.view.bars import Gantt
from megatron_adaptra.view.charts import Series, known, scale_top
from megatron_adaptra.view.png.plots import (
    BAD,
    GOOD,
    SOFT,
    draw_gantt,
    draw_legend,
    save,
    write_header,
)
from megatron_adaptra.view.report import Report
from megatron_adaptra.view.theme import REPLAN, SLOW_PHASE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TALLEST = 6.0  # inches of the rows of one timeline; those of many stages get lower
NOTE, COLUMNS = 0.2, 170  # inches and characters of a line of a note


def report_png(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the figure: headline, timelines on one scale, iteration times, link delays.

    Args:
        report: what to show; what it lacks is left out.
        path: of the PNG file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pictures = [(p, p.gantt) for p in findings.pictures(report) if p.gantt is not None]
    seconds = findings.common_seconds(report)
    charts = [
        (title, series)
        for title, series in (
            ("Iteration time, ms", findings.time_series(report)),
            ("Delay of the links, ms", findings.delay_series(report)),
        )
        if series
    ]
    rows = [
        (min(0.30 * max(1, gantt.rows), TALLEST) + 0.1) * (1.0 if picture.measured else 0.66)
        for picture, gantt in pictures
    ]
    tall = [r + 0.55 for r in rows] + [2.7] * bool(charts)
    reduced = _reduction(report)
    tall += [r + 0.55 for _, _, r in reduced] + [0.35] * bool(reduced)
    shared = _shared(report)
    tall += [r + 0.55 for _, _, r in shared] + [0.35] * bool(shared)
    notes = [line for note in findings.notes(report) for line in wrap(note, COLUMNS)]
    head, foot = 1.6 + NOTE * (len(notes) + bool(notes)), 0.35

    def draw(figure: Any, height: float) -> None:
        _header(figure, report, height)
        _notes(figure, notes, height)
        top = height - head
        for (picture, gantt), row, full in zip(pictures, rows, tall, strict=False):
            at = (0.07, (top - row) / height, 0.90, row / height)
            draw_gantt(figure.add_axes(at), gantt, seconds, picture.title)
            top -= full
        if pictures:
            draw_legend(figure, [gantt for _, gantt in pictures], seconds, (height - head) / height)
        wide = 0.90 / max(1, len(charts)) - (0.03 if len(charts) > 1 else 0.0)
        for i, (title, series) in enumerate(charts):
            left = 0.07 + i * (wide + 0.06)
            at = (left, (top - 2.25) / height, wide, 2.05 / height)
            _chart(figure.add_axes(at), series, report, title)
        top -= 2.7 if charts else 0.0
        for drawn, whole in (
            (reduced, reductions.common_seconds(report.reduction) if report.reduction else 0.0),
            (shared, share_decisions.common_seconds(report.shared) if report.shared else 0.0),
        ):
            if drawn:
                top -= 0.35
                draw_legend(figure, [gantt for _, gantt, _ in drawn], whole, top / height)
            for title, gantt, row in drawn:
                at = (0.07, (top - row) / height, 0.90, row / height)
                draw_gantt(figure.add_axes(at), gantt, whole, title)
                top -= row + 0.55

    save(path, head + sum(tall) + foot, draw)


def _reduction(report: Report) -> list[tuple[str, Gantt, float]]:
    """One all-reduce by native and by ours: titles, pictures, and inches of their rows."""
    if report.reduction is None:
        return []
    return [
        (f"One reduction, {p.title}", p.gantt, min(0.2 * max(1, p.gantt.rows), TALLEST) + 0.1)
        for p in reductions.pictures(report.reduction)
        if p.gantt is not None
    ]


def _shared(report: Report) -> list[tuple[str, Gantt, float]]:
    """One iteration of all replicas before and after: title, picture, and inches of its rows."""
    if (shared := report.shared) is None:
        return []
    words = f"{share_decisions.TITLE}: {share_decisions.title(shared)}"
    return [(words, shared.gantt, min(0.2 * shared.gantt.rows, TALLEST) + 0.1)]


def _header(figure: Any, report: Report, height: float) -> None:
    write_header(figure, height, findings.headline(report), findings.setting(report))
    results = findings.comparisons(report)
    summary = "   ".join(("✓ " if same else "✗ ") + words for words, same in results)
    fine = all(same for _, same in results)
    style = {"fontsize": 10.5, "fontweight": "bold", "color": GOOD if fine else BAD}
    figure.text(0.025, 1 - 0.93 / height, summary, va="top", **style)


def _notes(figure: Any, lines: Sequence[str], height: float) -> None:
    for i, line in enumerate(lines):
        y = 1 - (1.22 + NOTE * i) / height
        figure.text(0.025, y, line, va="top", fontsize=9.5, color=SOFT)


def _chart(axes: Axes, series: Sequence[Series], report: Report, title: str) -> None:
    """Draw the chart of the page; a very long first iteration leaves it at the top there, too."""
    for name, (first, end) in report.phases.items():
        if name == "slow":
            axes.axvspan(first - 0.5, end - 0.5, color=SLOW_PHASE, alpha=0.12, linewidth=0)
    seen: set[str] = set()
    for line in series:
        points = known(line.values)
        axes.plot(
            [i for i, _ in points],
            [v for _, v in points],
            color=line.colour,
            linewidth=1.6,
            linestyle=(0, (4, 2)) if line.dashed else "-",
            marker=".",
            markersize=3.5,
            label=line.name if line.name not in seen else None,
        )
        seen.add(line.name)
    for i, mark in enumerate(findings.replan_marks(report)):
        label = "replan" if i == 0 else None
        axes.axvline(mark.iteration, color=REPLAN, linewidth=1.1, linestyle="--", label=label)
    top = round_up(1.04 * scale_top(series))
    axes.set_ylim(0, top)
    axes.set_yticks(ticks(top, 5), [number(tick) for tick in ticks(top, 5)])
    axes.set_xlabel("iteration", fontsize=8.5)
    axes.tick_params(length=0, labelsize=8)
    axes.grid(axis="y", color="#e8ecf0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", pad=6)
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=3 if len(seen) > 3 else 6,  # beside the title
        frameon=False,
        fontsize=8.5,
        handlelength=1.6,
        columnspacing=1.2,
        borderaxespad=0.1,
    )
