"""The trade-off between memory and time as a table and as a page."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from megatron_adaptra.base.units import size
from megatron_adaptra.cli.job import in_words
from megatron_adaptra.cli.output import Table
from megatron_adaptra.cli.plugin import DEFAULT as PLUGIN
from megatron_adaptra.cli.plugin import flags_of, kept_in_words
from megatron_adaptra.cli.tradeoff import DEFAULT, LEVERS, SLOWDOWN, Cell, Comparison, Row
from megatron_adaptra.plan import Plan
from megatron_adaptra.view.axis import ms
from megatron_adaptra.view.charts import Curve, XYChart
from megatron_adaptra.view.html.page import charts_row, header, page, section, table
from megatron_adaptra.view.markup import element, prose
from megatron_adaptra.view.theme import BOUND, policy_colour

_STOCK = {"1f1b": "1F1B", "interleaved": "interleaved 1F1B"}
_AXIS = "activation budget of a stage, microbatches"


class Outcome(NamedTuple):
    """An outcome holds the plan that stock Megatron runs for a job, and the plugin's default plan.

    Each is None where the job's shape is refused. `activation_bytes`: of a microbatch, per stage,
    if known.
    """

    stock: Plan | None
    default: Plan | None
    activation_bytes: tuple[float, ...] | None = None

    @property
    def stock_name(self) -> str:
        """The schedule that stock Megatron runs, as people call it."""
        policy = self.stock.schedule.policy if self.stock else ""
        return _STOCK.get(policy, policy)

    def times(self, seconds: float) -> str:
        """Return the speed-up of an iteration of `seconds` over stock, `1.20×`, if it is known."""
        return f"{self.stock.predicted / seconds:.2f}×" if self.stock and seconds else ""


def table_of(result: Comparison, outcome: Outcome) -> Table:
    """Return a table of policies by budgets, with the lower bound without recompute below."""
    rows = [
        (row.name, *(_cell_text(c, result.bound) for c in row.cells), _flags(row, result))
        for row in result.rows
    ]
    bounds = (f"{1e3 * b:.1f}" for b in result.bounds)
    rows.append(("lower bound without recompute", *bounds, ""))
    names = (_budget_name(budget, outcome.activation_bytes) for budget in result.budgets)
    return Table("", ("policy", *names, "flags in training"), rows)


def notes(result: Comparison) -> list[str]:
    """Return the notes under the table: its terms, its dashes, and why policies are left out."""
    out = [
        "warmup: Megatron's own schedule with other warmup depths; adaptive: any order, and "
        "backwards split into input and weight gradients; recompute: some forwards run twice; a "
        "plan is adopted where it saves enough (--adaptra-min-gain)"
    ]
    if any(cell is None for row in result.rows for cell in row.cells):
        out.append("–: holds more activations than the budget allows")
    why: dict[str, list[str]] = {}
    for name, reason in result.refused.items():
        why.setdefault(reason, []).append(name)
    out += [f"left out: {', '.join(names)}; {reason}" for reason, names in why.items()]
    return out


def _flags(row: Row, result: Comparison) -> str:
    recompute = LEVERS.get(row.name, False)
    policy = "adaptive" if row.name in LEVERS else row.name
    return flags_of(policy, replace(result.conditions, recompute=recompute))


def _cell_text(cell: Cell | None, bound: float) -> str:
    if cell is None:
        return "–"
    return f"{1e3 * cell.seconds:.1f}" + (f" ({cell.seconds / bound:.2f} x)" if bound else "")


def _budget_name(budget: float, activation_bytes: tuple[float, ...] | None = None) -> str:
    if math.isinf(budget):
        return "no limit"
    most = f" ({size(budget * max(activation_bytes))})" if activation_bytes else ""
    return f"{budget:g}{most}"


def compare_html(title: str, result: Comparison, outcome: Outcome) -> str:
    """Return the HTML page. `title`: the user's name of the job."""
    cells = table_of(result, outcome)
    strong = [i for i, row in enumerate(result.rows) if row.name == DEFAULT]
    return page(
        headline(result, outcome),
        header(
            title,
            headline(result, outcome),
            [in_words(result.conditions), kept_in_words(outcome.default)],
        ),
        charts_row(charts(result)),
        section(
            "Every policy within every budget",
            table(cells.columns, cells.rows, strong),
            *(element("p", prose(words), class_="note") for words in notes(result)),
            note="Milliseconds of an iteration, and how many times the lower bound of "
            f"{ms(result.bound)}, by activation budget: the microbatches whose activations a "
            "stage may hold.",
        ),
    )


def headline(result: Comparison, outcome: Outcome) -> str:
    """Return a sentence that compares the plugin's default plan with stock Megatron."""
    if outcome.stock is None or outcome.default is None:
        return f"No plan of the plugin's default; the lower bound is {ms(result.bound)}"
    default = outcome.default
    times = outcome.times(default.predicted)
    if default.schedule.policy != DEFAULT:
        return f"With {PLUGIN} as fast as {outcome.stock_name}: {ms(default.predicted)}"
    return f"With {PLUGIN} {times} as fast as {outcome.stock_name}: {ms(default.predicted)}"


def charts(result: Comparison) -> list[XYChart]:
    """Return charts of the trade-off and, for links with delay, of the delay a budget hides."""
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
    out = [XYChart("Memory against time", _AXIS, "iteration, ms", curves, names, note)]
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
            f"most {100 * SLOWDOWN:g} % longer than with no delay, under policy adaptive "
            "(--adaptra-engine executor)."
        )
        title, axis = "How much delay a given memory hides", "delay hidden, ms"
        out.append(XYChart(title, _AXIS, axis, lines, names, note))
    return out
