"""The parts that every page is made of. A page needs nothing but itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_adaptra.view.bars import Gantt, legend_keys
from megatron_adaptra.view.charts import Curve, XYChart, xy_chart_svg
from megatron_adaptra.view.html.style import CSS
from megatron_adaptra.view.markup import element, prose, text
from megatron_adaptra.view.theme import REPLAN

_REPLAN = Curve("replan", REPLAN, (), dashed=True)  # of a chart's marks, for its legend


class Table(NamedTuple):
    """A table holds its cells as shown: words in the first column, numbers in the others."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def page(title: str, *parts: str, footer: str = "") -> str:
    """The whole document; `parts` and `footer` are markup, `title` is text."""
    head = (
        '<meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{text(title)}</title><style>{CSS}</style>"
    )
    body = element("main", *parts) + footer
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def header(name: str, headline: str, leads: Sequence[str] = (), *more: str) -> str:
    """Return the head of a page: subject (`name`), result (`headline`), setting (`leads`): text.

    `more` is markup.
    """
    parts = [element("p", text(name), class_="name")] if name else []
    parts.append(element("h1", prose(headline)))
    parts += [element("p", prose(lead)) for lead in leads if lead]
    return element("header", *parts, *more)


def tiles(items: Sequence[tuple[str, str]], first: str = "main") -> str:
    """The few numbers a reader takes home, `items`: each with what it is.

    `first`: how the first one stands out: main, bad, or not at all if empty.
    """
    boxes = [
        element(
            "div",
            element("b", text(big)),
            element("span", prose(small)),
            class_=f"tile {first}".strip() if i == 0 else "tile",
        )
        for i, (big, small) in enumerate(items)
    ]
    return element("div", *boxes, class_="tiles") if boxes else ""


def section(title: str, *content: str, note: str = "") -> str:
    """A card under `title`, with a quiet `note`: text. `content` is markup."""
    intro = element("p", prose(note), class_="note") if note else ""
    return element("section", element("h2", text(title)), intro, *content)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], strong: Sequence[int] = ()) -> str:
    """Text in cells: one row `head`, then `rows`; the first column is words.

    `strong`: the indices of the rows that stand out.
    """
    top = element("tr", *(element("th", text(cell)) for cell in head))
    body = [
        element(
            "tr",
            *(
                element("td", prose(cell), class_="strong" if i in strong and k else None)
                for k, cell in enumerate(row)
            ),
        )
        for i, row in enumerate(rows)
    ]
    inner = element("thead", top) + element("tbody", *body)
    return element("div", element("table", inner, class_="wide"), class_="scroll")


def charts_row(charts: Sequence[XYChart]) -> str:
    """Cards beside each other, each with one of the `charts` and its legend: markup."""
    width = 620 if len(charts) > 1 else 1160
    cards = [
        section(
            chart.title,
            curves_legend([*chart.curves, *[_REPLAN] * bool(chart.marks)]),
            element("div", xy_chart_svg(chart, width), class_="scroll"),
            note=chart.note,
        )
        for chart in charts
    ]
    return element("div", *cards, class_="pair" if len(cards) > 1 else None)


def gantt_legend(gantts: Sequence[Gantt], seconds: float) -> str:
    """Return the legend of `gantts` that are drawn on an axis of `seconds`."""
    items = []
    for key in legend_keys(gantts, seconds):
        if key.line:
            signs = [_sign("message", f"border-color:{key.fills[0]}")]
        else:
            signs = [_sign(None, f"background:{fill}") for fill in key.fills]
        items.append(element("span", *signs, text(key.words)))
    return element("p", *items, class_="legend")


def curves_legend(curves: Sequence[Curve]) -> str:
    """Names and signs of the `curves`, one for those that look alike."""
    items = []
    for name, colour, joined, dashed in dict.fromkeys(
        (curve.name, curve.colour, curve.joined, curve.dashed) for curve in curves
    ):
        if joined:
            sign = _sign("message", f"border-color:{colour}" + ";border-top-style:dashed" * dashed)
        else:
            sign = _sign("dot", f"background:{colour}")
        items.append(element("span", sign, text(name)))
    return element("p", *items, class_="legend")


def _sign(kind: str | None, style: str) -> str:
    return element("i", class_=kind, style=style)
