"""What a measurement of all-reduces, or of halves of them, has shown: a table, a page, a PNG."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_adaptra.bench.allreduce_options import NATIVE
from megatron_adaptra.bench.allreduce_rate import Rate
from megatron_adaptra.bench.options import ALLREDUCE
from megatron_adaptra.cli.output import Table
from megatron_adaptra.ir.collective import Goal
from megatron_adaptra.view.axis import number, size
from megatron_adaptra.view.charts import Curve, XYChart
from megatron_adaptra.view.html.chart import chart_section
from megatron_adaptra.view.html.page import header, page, table
from megatron_adaptra.view.png.charts import charts_png
from megatron_adaptra.view.theme import ADAPTRA, OTHER, STOCK

Row = Mapping[str, Any]
EXPLAINED = (
    "ms after the arrival of the last rank, medians; ratio: how many times as fast; native: "
    "torch's own over gloo; CPU: of all ranks together; k: pieces of the buffer"
)
_COLUMNS = {
    "late_ms": "late, ms", "ms_after_arrival": "ms after arrival", "spread_ms": "spread, ms",
    "predicted_ms": "predicted, ms", "ratio_to_ring": "ratio to ring",
    "ratio_to_native": "ratio to native", "cpu_ms": "CPU, ms",
}  # fmt: skip
_SHOWN = ("algorithm", "k", *_COLUMNS)
_COLOURS = {"direct": ADAPTRA, NATIVE: STOCK}


@dataclass(frozen=True)
class Finding:
    """`rows`: as `bench.allreduce.rows` gives them, with the `network` of each.

    `rates`: of hosts, in the order of their rows. `goal`: of what was measured.
    """

    rows: Sequence[Row]
    rates: Sequence[Rate] = ()
    goal: Goal = Goal.ALL_REDUCE

    @property
    def headline(self) -> str:
        """What was measured."""
        return f"{self.goal.value.capitalize()}s with late ranks"

    def data(self) -> dict[str, Any]:
        """As JSON."""
        rates = [{**asdict(rate), "kept": rate.kept} for rate in self.rates]
        kind = {"kind": ALLREDUCE, "collective": self.goal.value}
        return {**kind, "rates": rates, "rows": list(self.rows)}


def off_text(rate: Rate) -> str:
    """How far the ring was from its model at this `rate`, in words."""
    if rate.ring_off is None:
        return f"no ring was measured with {rate.used}"
    more = "more" if rate.ring_off > 0 else "less"
    return (
        f"with {rate.used} the ring took up to {abs(rate.ring_off):.0%} {more} than its model says"
    )


def rate_lines(finding: Finding) -> list[str]:
    """A line for each measurement with rates: those that were used, and whether they were kept."""
    lines = []
    for rate in finding.rates:
        line = off_text(rate)
        if rate.used != rate.asked:
            line += f"; asked for were {rate.asked}"
        if not rate.kept:
            line += ": this machine keeps no such rate, and the figures count for less"
        lines.append(line[0].upper() + line[1:])
    return lines


def tables_of(finding: Finding) -> list[Table]:
    """One for each network, number of ranks, size, and who is late."""
    tables = []
    for title, rows in _cases(finding.rows):
        columns = [_COLUMNS.get(name, name) for name in _SHOWN]
        cells = [[_cell(name, row[name]) for name in _SHOWN] for row in rows]
        tables.append(Table(title, columns, cells))
    return tables


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.startswith("ratio"):
        return f"{value:.2f}"
    return number(value) if isinstance(value, float) else str(value)


def html(finding: Finding) -> str:
    """The page."""
    sections = [
        chart_section(chart, table(each.columns, each.rows))
        for each, chart in zip(tables_of(finding), _charts(finding.rows), strict=True)
    ]
    top = header("adaptra bench", finding.headline, [EXPLAINED, *rate_lines(finding)])
    return page(finding.headline, top, *sections)


def png(path: str | os.PathLike[str], finding: Finding) -> None:
    """The same charts at `path`; ImportError where matplotlib is not installed."""
    charts_png(path, finding.headline, [EXPLAINED, *rate_lines(finding)], _charts(finding.rows))


def _cases(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """The rows that differ in algorithm and lateness alone, with what they have in common."""
    parts: dict[str, list[Row]] = {}
    for row in rows:
        late = ", ".join(map(str, row["late_ranks"]))
        late = f"late: rank {late}" if late else "none late"
        title = f"{row['network']}, {row['ranks']} ranks, {size(row['bytes'])}, {late}"
        parts.setdefault(title[0].upper() + title[1:], []).append(row)
    return list(parts.items())


def _charts(rows: Sequence[Row]) -> list[XYChart]:
    """Time over lateness, one for each of the tables."""
    return [_chart(title, part) for title, part in _cases(rows)]


def _chart(title: str, rows: Sequence[Row]) -> XYChart:
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        at = (row["late_ms"], row["ms_after_arrival"])
        points.setdefault(row["algorithm"], []).append(at)
    others = iter(OTHER)
    curves = [
        Curve(name, _COLOURS.get(name) or next(others), sorted(line))
        for name, line in points.items()
    ]
    return XYChart(title, "ms late", "ms after arrival", curves)
