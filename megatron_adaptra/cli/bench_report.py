"""The report of a measurement by `adaptra bench`: a table, and a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_adaptra.bench.options import COLLECTIVE, HOL, P2P
from megatron_adaptra.cli.output import Table
from megatron_adaptra.view.axis import number, size
from megatron_adaptra.view.charts import Curve, XYChart
from megatron_adaptra.view.html.page import charts_row, header, page, section, table
from megatron_adaptra.view.theme import ADAPTRA, BOUND, OTHER, STOCK

Row = Mapping[str, Any]
_COLOURS = (ADAPTRA, *OTHER)
_STOCK = ("gloo", "all_reduce gloo", "gloo in the queue")
_WORDS = {"in": "in the queue", "off": "off the queue"}
_HEADLINE = {
    P2P: "Messages between two ranks",
    COLLECTIVE: "Sums of a few numbers over all ranks",
    HOL: "Head-of-line blocking: compute beside messages over a slow link",
}
# Meanings of the columns that have no unit.
_NEAR = "ratio to gloo: how many times as fast; busbw: bus bandwidth as in nccl-tests"
_EXPLAINED = {
    P2P: f"copy: of memory, by one core; {_NEAR}",
    COLLECTIVE: _NEAR,
    HOL: "queue in: a step waits for the message before it, off: it does not; "
    "ratio to alone: to steps without messages",
}
_COLUMNS = {
    "mb_per_s": "MB/s", "us_per_message": "us per message", "us_per_call": "us per call",
    "busbw_gb_per_s": "busbw, GB/s",
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """A finding holds the `rows` of a measurement of one `kind`: p2p, collective or hol.

    `link`: of the laboratory, or empty. `least`: the least seconds of the link for a message, by
    its bytes; empty without a link.
    """

    kind: str
    link: str
    rows: Sequence[Row]
    least: Mapping[int, float]

    def data(self) -> dict[str, Any]:
        """Return the measurement as an object for JSON; `least_us` is there only with a link."""
        data: dict[str, Any] = {"kind": self.kind, "link": self.link or None}
        if self.least:
            data["least_us"] = {str(n): 1e6 * seconds for n, seconds in self.least.items()}
        return {**data, "rows": list(self.rows)}


def table_of(finding: Finding) -> Table:
    """Return all rows as a table; p2p over a link has each time as a multiple of the least."""
    columns = [_COLUMNS.get(name, name.replace("_", " ")) for name in finding.rows[0]]
    cells = [[_cell(name, value) for name, value in row.items()] for row in finding.rows]
    if finding.kind == P2P and finding.least:
        columns.append("times the link's least")
        for row, line in zip(finding.rows, cells, strict=True):
            times = row["us_per_message"] / (1e6 * finding.least[row["bytes"]])
            line.append("" if row["transport"] == "copy" else f"{times:.2f}")
    link = f"over a link of {finding.link}; " if finding.link else ""
    return Table(link + _EXPLAINED[finding.kind], columns, cells)


def _cell(name: str, value: object) -> str:
    if name == "bytes":
        return size(int(str(value)))
    if name == "busbw_gb_per_s":
        return f"{value:.3g}"  # three digits, as small messages make it much less than 1
    return number(value) if isinstance(value, float) else str(value)


def html(finding: Finding) -> str:
    """Return the measurement as an HTML page."""
    cells = table_of(finding)
    headline = _HEADLINE[finding.kind]
    return page(
        headline,
        header("adaptra bench", headline, [cells.title]),
        charts_row(_charts(finding)),
        section("All figures", table(cells.columns, cells.rows)),
    )


def _charts(finding: Finding) -> list[XYChart]:
    """Return a chart per direction (p2p) or number of ranks (collective), or one chart (hol)."""
    rows, least = finding.rows, finding.least
    if finding.kind == P2P:
        key, label, scale = "mb_per_s", "MB/s each way", 1.0
        if least:
            rows = [row for row in rows if row["transport"] != "copy"]
            key, label, scale = "us_per_message", "ms of a message", 1e-3
        line = [(math.log2(n), 1e3 * seconds) for n, seconds in least.items()]
        bound = [Curve("delay + bytes / bandwidth", BOUND, line, marked=False, dashed=True)]
        return [
            _chart(way, part, ("transport",), key, label, scale, bound if least else [])
            for way, part in _by(rows, "direction")
        ]
    if finding.kind == COLLECTIVE:
        ways = ("collective", "transport")
        return [
            _chart(f"{ranks} ranks", part, ways, "us_per_call", "us of a call")
            for ranks, part in _by(rows, "ranks")
        ]
    title, label = "Steps beside messages", "of the steps beside nothing"
    return [_chart(title, rows, ("transport", "queue"), "ratio_to_alone", label)]


def _chart(
    title: str,
    rows: Sequence[Row],
    names: Sequence[str],
    key: str,
    label: str,
    scale: float = 1.0,
    more: Sequence[Curve] = (),
) -> XYChart:
    """Return a chart with a curve over message size for each combination of columns `names`."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name = " ".join(_WORDS.get(row[n], str(row[n])) for n in names)
        points.setdefault(name, []).append((math.log2(row["bytes"]), scale * row[key]))
    curves = [
        Curve(name, STOCK if name in _STOCK else next(colours), line)
        for colours in [iter(_COLOURS)]
        for name, line in points.items()
    ]
    ticks = {math.log2(row["bytes"]): size(row["bytes"]) for row in rows}
    return XYChart(title.capitalize(), "size", label, [*curves, *more], ticks)


def _by(rows: Sequence[Row], column: str) -> list[tuple[str, list[Row]]]:
    """Group the rows by their value in a column."""
    values = dict.fromkeys(row[column] for row in rows)
    return [(str(value), [row for row in rows if row[column] == value]) for value in values]
