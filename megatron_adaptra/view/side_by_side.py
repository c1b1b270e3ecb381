"""Several Gantts on one scale, one above the other: page or PNG."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from megatron_adaptra.view.bars import Gantt
from megatron_adaptra.view.drawing import WIDTH, Table
from megatron_adaptra.view.html.legend import gantt_legend
from megatron_adaptra.view.html.page import header, page, section, table, tiles
from megatron_adaptra.view.markup import element
from megatron_adaptra.view.png.plots import draw_gantt, draw_legend, save, write_header
from megatron_adaptra.view.svg.gantt import gantt_svg

ROW, INCHES = 18, 0.27  # pixels, and inches in a PNG, of a row
TALLEST = 6.0  # inches of the rows of one Gantt
CHARACTERS = 160  # of a line of text in a PNG


def side_by_side_html(
    name: str,
    headline: str,
    leads: Sequence[str],
    figures: Sequence[tuple[str, str]],
    gantts: Mapping[str, Gantt],
    cells: Table,
) -> str:
    """The page.

    Args:
        name: of what is compared; empty for none.
        headline: what came out.
        leads: more sentences.
        figures: the most important ones, as text, each with what it is.
        gantts: by title, drawn on the scale of the longest.
        cells: the table that stands before them.
    """
    seconds = _seconds(gantts)
    pictures = [
        element(
            "div", gantt_svg(gantt, seconds, width=WIDTH, row=ROW, title=title), class_="scroll"
        )
        for title, gantt in gantts.items()
    ]
    return page(
        headline,
        header(name, headline, leads),
        tiles(figures),
        section(cells.title, table(cells.head, cells.rows)),
        section(
            "The iterations on one scale",
            gantt_legend(list(gantts.values()), seconds),
            *pictures,
            note="Hover over a box or a line for its times.",
        ),
    )


def side_by_side_png(
    path: str | os.PathLike[str], headline: str, leads: Sequence[str], gantts: Mapping[str, Gantt]
) -> None:
    """The same pictures at `path`; `headline`, `leads` and `gantts` as for the page.

    Raises ImportError where matplotlib is not installed.
    """
    seconds, between, foot = _seconds(gantts), 0.55, 0.35
    tall = [min(INCHES * max(1, gantt.rows), TALLEST) for gantt in gantts.values()]
    lines = [line for lead in leads for line in wrap(lead, CHARACTERS)]
    head = 1.45 + 0.25 * len(lines)

    def draw(figure: Any, height: float) -> None:
        write_header(figure, height, headline, *lines)
        top = height - head
        draw_legend(figure, list(gantts.values()), seconds, (top + 0.25) / height)
        for (title, gantt), rows in zip(gantts.items(), tall, strict=True):
            at = (0.07, (top - rows) / height, 0.90, rows / height)
            draw_gantt(figure.add_axes(at), gantt, seconds, title)
            top -= rows + between

    save(path, head + sum(tall) + between * (len(tall) - 1) + foot, draw)


def _seconds(gantts: Mapping[str, Gantt]) -> float:
    """The length of the common axis, with room for the last label."""
    return 1.02 * max((gantt.makespan for gantt in gantts.values()), default=0.0) or 1.0
