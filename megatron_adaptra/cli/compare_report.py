"""The trade-off between memory and time as a table, as a page and as a PNG."""

from __future__ import annotations

import math
import os

from megatron_adaptra.cli.job import in_words
from megatron_adaptra.cli.output import Table
from megatron_adaptra.cli.tradeoff import LEVERS, Cell, Comparison
from megatron_adaptra.plan import Plan
from megatron_adaptra.view.axis import ms, number
from megatron_adaptra.view.charts import Curve, XYChart
from megatron_adaptra.view.html.legend import curves_legend
from megatron_adaptra.view.html.page import header, page, section, table, tiles
from megatron_adaptra.view.markup import element, text
from megatron_adaptra.view.png.charts import charts_png
from megatron_adaptra.view.svg.xy_chart import xy_chart_svg
from megatron_adaptra.view.theme import BOUND, policy_colour

_STOCK = {"1f1b": "1F1B", "interleaved": "interleaved 1F1B"}
_AXIS = "activation budget of a stage, microbatches"


def table_of(result: Comparison) -> Table:
    """Policies by budgets, and below them what no schedule that recomputes nothing can beat."""
    rows = [(row.name, *(_cell_text(c, result.bound) for c in row.cells)) for row in result.rows]
    rows.append(("lower bound without recompute", *(f"{1e3 * b:.1f}" for b in result.bounds)))
    return Table("", ("policy", *map(_budget_name, result.budgets)), rows)


def _cell_text(cell: Cell | None, bound: float) -> str:
    if cell is None:
        return "–"
    return f"{1e3 * cell.seconds:.1f}" + (f" ({cell.seconds / bound:.2f} x)" if bound else "")


def _budget_name(budget: float) -> str:
    return "no limit" if math.isinf(budget) else f"{budget:g}"


def compare_html(title: str, result: Comparison, stock: Plan | None, share: float) -> str:
    """The page. `title`: what the user calls the job; `share`: of --max-slowdown."""
    charts = [
        section(
            chart.title,
            curves_legend(chart.curves),
            element("div", xy_chart_svg(chart), class_="scroll"),
            note=chart.note,
        )
        for chart in _charts(result, share)
    ]
    cells = table_of(result)
    notes = [f"{name} is left out: {reason}" for name, reason in result.refused.items()]
    return page(
        _headline(result, stock),
        header(title, _headline(result, stock), [in_words(result.conditions)]),
        tiles(_tiles(result, stock)),
        element("div", *charts, class_="pair"),
        section(
            "Every policy within every budget",
            table(cells.columns, cells.rows, _strong(result)),
            *(element("p", text(words), class_="note") for words in notes),
            note="Milliseconds of an iteration, and how many times the lower bound of "
            f"{ms(result.bound)}. –: holds more activations than the budget allows.",
        ),
    )


def compare_png(
    path: str | os.PathLike[str], title: str, result: Comparison, stock: Plan | None, share: float
) -> None:
    """The same charts as a picture at `path`; ImportError where matplotlib is not installed.

    `title` and `share` are those of the page.
    """
    lead = ": ".join(filter(None, (title, in_words(result.conditions))))
    charts_png(path, _headline(result, stock), [lead], _charts(result, share))


def _headline(result: Comparison, stock: Plan | None) -> str:
    """What adapting gains in the memory that stock takes, and with no limit."""
    free = min((row.unlimited.seconds for row in result.adaptive), default=0.0)
    if not free:
        return f"No schedule is faster than {ms(result.bound)}"
    if stock is None:
        return f"Adaptive: {ms(free)}, {free / result.bound:.2f}× the lower bound"
    name = _STOCK.get(stock.schedule.policy, stock.schedule.policy)
    same = _same_memory(result, stock)
    times = f"{stock.predicted / free:.2f}×"
    if not same:
        return f"{times} as fast as {name} with no limit of memory"
    return (
        f"{stock.predicted / same:.2f}× as fast as {name} in the same memory, {times} with no limit"
    )


def _same_memory(result: Comparison, stock: Plan) -> float | None:
    """The best adaptive iteration within a budget that is no more than what stock holds."""
    most = math.ceil(max(stock.peak_in_flight) - 1e-9)
    inside = [
        cell.seconds
        for row in result.adaptive
        for budget, cell in zip(result.budgets, row.cells, strict=True)
        if cell and budget <= most
    ]
    return min(inside, default=None)


def _charts(result: Comparison, share: float) -> list[XYChart]:
    """The trade-off and, where there is delay, how much of it a budget hides."""
    count = result.conditions.microbatches
    at = [min(budget, float(count)) for budget in result.budgets]
    names = {
        x: _budget_name(b) if not math.isinf(b) else f"{count} (all)"
        for x, b in zip(at, result.budgets, strict=True)
    }
    curves = []
    for row in sorted(result.rows, key=lambda row: row.name in LEVERS):
        points = [(row.unlimited.peak, 1e3 * row.unlimited.seconds)]
        if not row.fixed:
            points = [(x, 1e3 * c.seconds) for x, c in zip(at, row.cells, strict=True) if c]
        curves.append(Curve(row.name, policy_colour(row.name), points, joined=not row.fixed))
    ends = sorted({x for curve in curves for x, _ in curve.points} | set(at))
    bound = [(x, 1e3 * result.bound) for x in (ends[0], ends[-1])]
    curves.append(Curve("lower bound", BOUND, bound, marked=False, dashed=True))
    note = "A single dot is a policy that ignores the budget, at the memory that it needs."
    charts = [XYChart("Memory against time", _AXIS, "iteration, ms", curves, names, note)]
    if result.tolerance:
        worst = 1e3 * max(link.delay for link in result.conditions.links.values())
        lines = [
            Curve(
                name,
                policy_colour(name),
                [(x, times * worst) for x, times in zip(at, tolerance, strict=True)],
            )
            for name, tolerance in result.tolerance.items()
        ]
        job = [(x, worst) for x in (at[0], at[-1])]
        lines.append(Curve("this job", BOUND, job, marked=False, dashed=True))
        note = (
            f"The delay of the slowest link (all scaled alike) up to which an iteration takes at "
            f"most {100 * share:g} % longer than with no delay."
        )
        title, axis = "How much delay a given memory hides", "delay hidden, ms"
        charts.append(XYChart(title, _AXIS, axis, lines, names, note))
    return charts


def _tiles(result: Comparison, stock: Plan | None) -> list[tuple[str, str]]:
    out = []
    if stock is not None:
        peak = number(max(stock.peak_in_flight))
        out.append(
            (ms(stock.predicted), f"{stock.schedule.policy}, which holds {peak} microbatches")
        )
        same = _same_memory(result, stock)
        if same is not None:
            out.insert(0, (ms(same), "adaptive in the same memory"))
    free = min((row.unlimited for row in result.adaptive), default=None)
    if free is not None:
        out.append((ms(free.seconds), f"adaptive with no limit, which holds {number(free.peak)}"))
    out.append((ms(result.bound), "lower bound: no schedule is faster"))
    return out


def _strong(result: Comparison) -> list[int]:
    return [i for i, row in enumerate(result.rows) if row.name in LEVERS]
