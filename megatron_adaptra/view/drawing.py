"""One Gantt as a picture of its own: SVG or page."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_adaptra.view.axis import ms
from megatron_adaptra.view.bars import Gantt
from megatron_adaptra.view.html.page import gantt_legend, header, page, section
from megatron_adaptra.view.markup import element
from megatron_adaptra.view.svg.gantt import gantt_svg

WIDTH = 1160  # pixels


@dataclass(frozen=True)
class Drawing:
    """A drawing holds a Gantt, and the words around it.

    Args:
        name: of the subject, such as a policy.
        job: the planned job, in a sentence; empty for none.
        why: why it was planned so, in a sentence.
        gantt: its bars.
        bound: seconds that nothing beats; None where that is not known.
        title: stands over the Gantt on a page.
        length: seconds of the subject, where the Gantt shows something longer beside it; None for
            the Gantt's own.
    """

    name: str
    job: str
    why: str
    gantt: Gantt
    bound: float | None = None
    title: str = "The iteration"
    length: float | None = None

    @property
    def seconds(self) -> float:
        """The length of the axis, with room for the last label."""
        return 1.02 * self.gantt.makespan or 1.0

    def headline(self) -> str:
        """Return the name, the length, and how many times the lower bound that is."""
        length = self.gantt.makespan if self.length is None else self.length
        text = f"{self.name}: {ms(length)}"
        if self.bound:
            text += f", {length / self.bound:.2f}× the lower bound"
        return text


def drawing_svg(drawing: Drawing, width: int = WIDTH) -> str:
    """An SVG file of its own, `width` pixels wide, with colours for light and dark pages."""
    title = f"{drawing.name}; {drawing.job}" if drawing.job else drawing.name
    return gantt_svg(drawing.gantt, drawing.seconds, width=width, title=title, alone=True)


def drawing_html(drawing: Drawing, width: int = WIDTH) -> str:
    """A page with the Gantt, `width` pixels wide."""
    svg = gantt_svg(drawing.gantt, drawing.seconds, width=width, title=drawing.name)
    style = f"min-width:{width}px" if width > WIDTH else None  # a wider one is scrolled
    return page(
        drawing.headline(),
        header(drawing.job, drawing.headline(), [drawing.why]),
        section(
            drawing.title,
            gantt_legend([drawing.gantt], drawing.seconds),
            element("div", element("div", svg, style=style), class_="scroll"),
            note="Hover over a box or a line for its times.",
        ),
    )
