"""One timeline of a schedule as a picture of its own: SVG, page or PNG."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.view.axis import ms, number
from megatron_adaptra.view.html.legend import timeline_legend
from megatron_adaptra.view.html.page import header, page, section, table, tiles
from megatron_adaptra.view.markup import element
from megatron_adaptra.view.png.plots import draw_gantt, draw_legend, save, write_header
from megatron_adaptra.view.svg.gantt import timeline_svg

WIDTH = 1160  # pixels


@dataclass(frozen=True)
class Drawing:
    """What a picture shows: `why` and `job` are sentences; `bound` None where there is none."""

    name: str
    job: str
    why: str
    timeline: Timeline
    bound: float | None = None

    @property
    def seconds(self) -> float:
        """The length of the axis, with room for the last label."""
        return 1.02 * self.timeline.makespan or 1.0

    def headline(self) -> str:
        """How long an iteration takes, and how far that is from the bound."""
        text = f"{self.name}: {ms(self.timeline.makespan)}"
        if self.bound:
            text += f", {self.timeline.makespan / self.bound:.2f}× the lower bound"
        return text


def drawing_svg(drawing: Drawing, width: int = WIDTH) -> str:
    """A file of its own, `width` pixels wide, with a legend and with colours for light and dark."""
    return timeline_svg(
        drawing.timeline,
        drawing.seconds,
        width=width,
        title=f"{drawing.name}; {drawing.job}" if drawing.job else drawing.name,
        end=drawing.timeline.makespan,
        alone=True,
    )


def drawing_html(drawing: Drawing, width: int = WIDTH) -> str:
    """A page: the timeline, `width` pixels wide, and its figures, stage by stage."""
    timeline = drawing.timeline
    makespan = timeline.makespan
    compute = timeline.pipeline  # the shares are of the pipeline, as the step is not its matter
    busy = [timeline.busy(stage) for stage in range(timeline.stages)]
    peaks = timeline.peak_in_flight()
    svg = timeline_svg(timeline, drawing.seconds, width=width, title=drawing.name, end=makespan)
    key_figures = [(ms(makespan), "an iteration, predicted")]
    if drawing.bound:
        key_figures.append((ms(drawing.bound), "no schedule is faster"))
    if compute > 0:
        idle = 1 - sum(busy) / len(busy) / compute
        key_figures.append((f"{100 * idle:.1f} %", "of the time a stage waits, on average"))
    if peaks:
        key_figures.append((number(max(peaks)), "microbatches' activations on one stage at most"))
    rows = [
        [
            f"stage {stage}",
            ms(b),
            f"{100 * b / compute:.1f} %" if compute > 0 else "",
            ms(compute - b),
            number(peak),
        ]
        for stage, (b, peak) in enumerate(zip(busy, peaks, strict=True))
    ]
    return page(
        drawing.headline(),
        header(drawing.job, drawing.headline(), [drawing.why]),
        tiles(key_figures),
        section(
            "The iteration",
            timeline_legend([timeline], drawing.seconds),
            element("div", element("div", svg, style=_wide(width)), class_="scroll"),
            note="Hover over a box or a line for its times.",
        ),
        section(
            "Stage by stage", table(("", "compute", "share", "waiting", "peak in flight"), rows)
        ),
    )


def _wide(width: int) -> str | None:
    """A picture that is wider than asked for by default is scrolled and not made to fit."""
    return f"min-width:{width}px" if width > WIDTH else None


def drawing_png(drawing: Drawing, path: str | os.PathLike[str]) -> None:
    """Raises ImportError where matplotlib is not installed."""
    timeline, head, foot = drawing.timeline, 1.75, 0.4
    tall = 0.34 * max(1, timeline.stages) + 0.1

    def draw(figure: Any, height: float) -> None:
        write_header(figure, height, drawing.headline(), drawing.job, drawing.why)
        at = (0.07, foot / height, 0.90, tall / height)
        end = timeline.makespan
        draw_gantt(figure.add_axes(at), timeline, drawing.seconds, "", end)
        draw_legend(figure, [timeline], drawing.seconds, (foot + tall + 0.2) / height)

    save(path, head + tall + foot, draw)
