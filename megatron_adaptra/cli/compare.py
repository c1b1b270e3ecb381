"""`adaptra compare`: all policies and activation budgets for one job."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.base.files import results_folder
from megatron_adaptra.base.units import number
from megatron_adaptra.cli.compare_report import (
    Outcome,
    compare_html,
    headline,
    notes,
    table_of,
)
from megatron_adaptra.cli.job import add_job, in_words, job_of, title_of
from megatron_adaptra.cli.output import finish, progress, say, show_table
from megatron_adaptra.cli.planning import add_planning, plan_of, stock_of
from megatron_adaptra.cli.plugin import default_plan, kept_in_words
from megatron_adaptra.cli.tradeoff import (
    LEVERS,
    SLOWDOWN,
    Cell,
    Comparison,
    compare,
    default_budgets,
    delay_tolerance,
    names_of_rows,
    within,
)
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.plan import Plan

MOST_BUDGETS = 50  # each takes some plans


def add_parser(subparsers: Any) -> None:
    """Add this command to the `subparsers` of argparse."""
    parser = subparsers.add_parser(
        "compare",
        help="all policies and activation budgets for a job, side by side",
        description="Plan a job with every policy and within several activation budgets. With "
        "--out, also find the longest delay that each budget can hide (for at most "
        f"{100 * SLOWDOWN:g} % of an iteration more), and draw charts. With "
        "--replicas: 1F1B and each move between replicas instead.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--budgets",
        metavar="X,...",
        help="activation budgets of a stage, in microbatches; inf for no limit (default: what "
        "1F1B holds, 1.5, 2 and 3 times that, the job's own, inf)",
    )
    add("--out", metavar="DIR", help="write compare.json and compare.html there")
    add("--json", action="store_true", help="print one JSON object")
    add_job(parser)
    add_planning(parser, policy=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare, print, and write the report if asked; the exit status.

    Raises BadInput for values of `args` that a job has no use for.
    """
    job = job_of(args)
    conditions = job.conditions
    if job.replicas is not None:
        from megatron_adaptra.cli.replicas.compare import compare_replicas

        return compare_replicas(args, job, _budgets_of(args.budgets) if args.budgets else ())
    budgets = _budgets_of(args.budgets) if args.budgets else default_budgets(conditions)
    folder = results_folder(Path(args.out)) if args.out else None

    limited = sum(map(math.isfinite, budgets))
    made, all_plans = itertools.count(1), len(names_of_rows()) * (1 + limited) + 1
    with progress("planning", lines=True) as at:

        def make(conditions: Conditions, policy: str) -> Plan:
            at(f"{next(made)} of {all_plans} plans, policy {policy}")
            return plan_of(args, conditions, policy)

        result = compare(conditions, budgets, make)
        default = default_plan(conditions, args.sends, make)
    if folder and any(link.delay for link in conditions.links.values()):
        with progress("finding the longest delay that each budget hides", lines=True) as at:
            result = replace(result, tolerance=_tolerance(args, result, at))
    stock = stock_of(conditions, args.sends)
    data = {
        **_as_json(result, stock),
        "default_engine_ms": None if default is None else 1e3 * default.predicted,
    }
    outcome = Outcome(stock, default, job.activation_bytes)
    return finish(
        args,
        folder,
        "compare",
        data,
        lambda: compare_html(title_of(args), result, outcome),
        lambda: _show(result, outcome),
    )


def _tolerance(
    args: argparse.Namespace, result: Comparison, at: Callable[[str], None]
) -> dict[str, tuple[float, ...]]:
    """Per lever and budget, the largest multiple of the delays that is hidden."""

    def make(conditions: Conditions, policy: str) -> Plan:
        return plan_of(args, conditions, policy)

    out, done = {}, 0
    for row in result.adaptive:
        job, found = replace(result.conditions, recompute=LEVERS[row.name]), []
        for budget in result.budgets:
            done += 1
            at(f"{done} of {len(result.adaptive) * len(result.budgets)}")
            found.append(delay_tolerance(within(job, budget), make))
        out[row.name] = tuple(found)
    return out


def _budgets_of(text: str) -> tuple[float, ...]:
    try:
        budgets = {number(word) for word in text.split(",")}
    except ValueError:
        budgets = {math.nan}
    if not all(budget >= 1 for budget in budgets):
        raise BadInput(
            "--budgets", text, "it has to be numbers of at least 1, or inf, with commas between"
        )
    if len(budgets) > MOST_BUDGETS:
        raise BadInput("--budgets", text, f"it has to be at most {MOST_BUDGETS} numbers")
    return tuple(sorted(budgets))


def _as_json(result: Comparison, stock: Plan | None) -> dict[str, Any]:
    """Infinity is null: a budget without limit."""

    def cell(it: Cell | None) -> dict[str, float] | None:
        return it and {
            "iteration_ms": 1e3 * it.seconds,
            "ratio_to_unlimited_bound": it.seconds / result.bound if result.bound else 1.0,
            "peak_in_flight": it.peak,
        }

    return {
        "conditions": result.conditions.to_json(),
        "budgets": [None if math.isinf(b) else b for b in result.budgets],
        "unlimited_bound_ms": 1e3 * result.bound,
        "lower_bounds_ms": [1e3 * bound for bound in result.bounds],
        "stock_ms": None if stock is None else 1e3 * stock.predicted,
        "policies": {
            row.name: {
                "unlimited": cell(row.unlimited),
                "within_budgets": [cell(c) for c in row.cells],
            }
            for row in result.rows
        },
        "refused": result.refused,
        "delay_tolerance": {k: list(v) for k, v in result.tolerance.items()},
    }


def _show(result: Comparison, outcome: Outcome) -> None:
    say(in_words(result.conditions))
    for line in (headline(result, outcome), kept_in_words(outcome.default)):
        if line:
            say(line)
    say(
        "milliseconds of an iteration, and how many times the lower bound for any memory "
        f"({1e3 * result.bound:.1f} ms), by activation budget of a stage in microbatches"
    )
    show_table(table_of(result, outcome))
    for line in notes(result):
        say(line)
