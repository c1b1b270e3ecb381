"""Several Gantts on one scale, one above the other: a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_adaptra.view.bars import Gantt
from megatron_adaptra.view.drawing import WIDTH, Table
from megatron_adaptra.view.html.legend import gantt_legend
from megatron_adaptra.view.html.page import header, page, section, table, tiles
from megatron_adaptra.view.markup import element
from megatron_adaptra.view.svg.gantt import gantt_svg

ROW = 18  # pixels of a row


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
    longest = max((gantt.makespan for gantt in gantts.values()), default=0.0)
    seconds = 1.02 * longest or 1.0  # with room for the last label
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
