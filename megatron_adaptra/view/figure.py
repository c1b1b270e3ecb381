"""The report as one PNG, for places that show no HTML: a README, a chat, a slide.

matplotlib is an optional dependency and is imported only here, when a figure is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.timeline import Span, Timeline
from megatron_adaptra.view import facts
from megatron_adaptra.view.axis import ms, number, round_up, ticks
from megatron_adaptra.view.chart import Series, known, scale_top
from megatron_adaptra.view.report import Report
from megatron_adaptra.view.svg import slow_messages
from megatron_adaptra.view.theme import (
    MESSAGE,
    OP_FILL,
    OP_TEXT,
    REPLAN,
    SLOW_PHASE,
    op_fill,
    op_name,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, SOFT, GOOD, BAD = "#1b2530", "#5b6875", "#0e7c7b", "#b3372f"
BOX = 0.62  # height of a stage's boxes; the rest of the row is for messages
INCHES = 13.0
STYLE = {
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": "#c9d1d9",
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,
}


def report_png(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the figure: headline, timelines on one scale, iteration times, link delays."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    pictures = [(p, p.timeline) for p in facts.pictures(report) if p.timeline is not None]
    seconds = facts.common_seconds(report)
    charts = [
        (title, series)
        for title, series in (
            ("Iteration time, ms", facts.time_series(report)),
            ("Delay of the links, ms", facts.delay_series(report)),
        )
        if series
    ]
    rows = [
        (0.30 * max(1, timeline.stages) + 0.1) * (1.0 if picture.measured else 0.66)
        for picture, timeline in pictures
    ]
    tall = [r + 0.55 for r in rows] + [2.7] * bool(charts)
    head, foot = 1.45, 0.35
    height = head + sum(tall) + foot
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(INCHES, height), dpi=130, facecolor="white")
        FigureCanvasAgg(figure)
        _header(figure, report, height)
        top = height - head
        for (picture, timeline), row, full in zip(pictures, rows, tall, strict=False):
            at = (0.07, (top - row) / height, 0.90, row / height)
            _gantt(figure.add_axes(at), timeline, seconds, picture.title)
            top -= full
        if pictures:
            _legend(figure, [t for _, t in pictures], seconds, (height - head) / height)
        wide = 0.90 / max(1, len(charts)) - (0.03 if len(charts) > 1 else 0.0)
        for i, (title, series) in enumerate(charts):
            left = 0.07 + i * (wide + 0.06)
            at = (left, (top - 2.25) / height, wide, 2.05 / height)
            _chart(figure.add_axes(at), series, report, title)
        figure.savefig(path, format="png")


def _header(figure: Any, report: Report, height: float) -> None:
    def put(words: str, inches: float, **style: Any) -> None:
        figure.text(0.025, 1 - inches / height, words, va="top", **style)

    put(facts.headline(report), 0.22, fontsize=21, fontweight="bold")
    put(facts.setting(report), 0.68, fontsize=10.5, color=SOFT)
    said = "   ".join(("✓ " if same else "✗ ") + words for words, same in facts.verdicts(report))
    fine = all(same for _, same in facts.verdicts(report))
    put(said, 0.93, fontsize=10.5, fontweight="bold", color=GOOD if fine else BAD)


def _gantt(axes: Axes, timeline: Timeline, seconds: float, title: str) -> None:
    begin = min((span.start for span in timeline.spans), default=0.0)
    for stage in range(timeline.stages):
        mine = [s for s in timeline.spans if s.stage == stage]
        axes.broken_barh(
            [(1e3 * (s.start - begin), 1e3 * (s.end - s.start)) for s in mine],
            (stage - BOX / 2, BOX),
            facecolors=[op_fill(s.op.kind) for s in mine],
            edgecolor="white",
            linewidth=0.5,
        )
        for span in mine:
            _word(axes, span, begin, seconds)
    for m in slow_messages(timeline, seconds):
        side = BOX / 2 if m.target > m.source else -BOX / 2
        times = [1e3 * (m.sent - begin), 1e3 * (m.arrived - begin)]
        axes.plot(times, [m.source + side, m.target - side], color=MESSAGE, lw=0.7, alpha=0.75)
    end = 1e3 * timeline.iteration
    axes.axvline(end, color=INK, linewidth=0.9, linestyle=(0, (3, 2)))
    axes.annotate(
        ms(timeline.iteration),
        (end, 1),
        (0, 4),
        ("data", "axes fraction"),
        "offset points",
        ha="center",
        fontweight="bold",
        fontsize=9,
    )
    axes.set_xlim(0, 1e3 * seconds)
    axes.set_ylim(max(timeline.stages, 1) - 0.45, -0.55)
    marks = ticks(1e3 * seconds, 10)
    axes.set_xticks(marks, [number(tick) if tick else "0 ms" for tick in marks])
    axes.set_yticks(range(timeline.stages), [f"stage {s}" for s in range(timeline.stages)])
    axes.tick_params(length=0, labelsize=8)
    axes.grid(axis="x", color="#e8ecf0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_title(title[:1].upper() + title[1:], loc="left", fontsize=10, fontweight="bold", pad=5)


def _word(axes: Axes, span: Span, begin: float, seconds: float) -> None:
    """An op's text, or its microbatch, where its box is wide enough."""
    inches = (span.end - span.start) / seconds * 0.90 * INCHES
    tail = span.op.kind is Kind.TAIL
    for word in ["tail"] if tail else [str(span.op), str(span.op.microbatch)]:
        if inches >= 0.065 * len(word) + 0.02:
            middle = 500 * (span.start + span.end - 2 * begin)
            style: dict[str, Any] = {
                "ha": "center",
                "va": "center_baseline",
                "fontsize": 6.5,
                "color": OP_TEXT,
            }
            axes.text(middle, span.stage, word, **style)
            return


def _legend(figure: Any, timelines: Sequence[Timeline], seconds: float, y: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = {span.op.kind for timeline in timelines for span in timeline.spans}
    handles: list[Any] = [
        Patch(facecolor=fill, label=op_name(kind))
        for kind, fill in OP_FILL.items()
        if kind in kinds
    ]
    if any(slow_messages(timeline, seconds) for timeline in timelines):
        handles.append(Line2D([], [], color=MESSAGE, linewidth=1, label="message on a slow link"))
    figure.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(0.97, y + 0.022),
        ncols=len(handles),
        frameon=False,
        fontsize=8.5,
        handlelength=1.2,
        borderaxespad=0,
        columnspacing=1.4,
    )


def _chart(axes: Axes, series: Sequence[Series], report: Report, title: str) -> None:
    """As in the page: the first iteration may leave the picture at the top."""
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
    for i, mark in enumerate(facts.replan_marks(report)):
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
        ncols=6,
        frameon=False,
        fontsize=8.5,
        handlelength=1.6,
        columnspacing=1.2,
        borderaxespad=0.1,
    )
