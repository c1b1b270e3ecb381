"""`adaptra plan`: the best schedule for a job, and what it gains over the one Megatron runs."""

from __future__ import annotations

import argparse
import time
from typing import Any

from megatron_adaptra.cli.job import add_job, add_policy, job_of, plan_of, stock_of
from megatron_adaptra.cli.output import Table, ms, numbers, print_json, say, show_table
from megatron_adaptra.ir.check import check
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.model.bounds import unlimited_bound
from megatron_adaptra.plan import Plan


def add_parser(subparsers: Any) -> None:
    """Add this command to the `subparsers` of argparse."""
    parser = subparsers.add_parser(
        "plan",
        help="the schedule that a job with slow links should run",
        description="Plan the schedule of a job whose links may be slow, and predict its time.",
        allow_abbrev=False,
    )
    add_policy(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_job(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan, prove that the plan can run, and print it; the exit status."""
    conditions = job_of(args)
    start = time.perf_counter()
    plan = plan_of(args, conditions, args.policy)
    planning_ms = 1e3 * (time.perf_counter() - start)
    check(plan.program, conditions.activation_budget)
    stock = stock_of(conditions, args.sends)
    if args.json:
        stock_ms = None if stock is None else 1e3 * stock.predicted
        more = {
            "unlimited_bound_ms": 1e3 * unlimited_bound(conditions),
            "stock_ms": stock_ms,
            "planning_ms": planning_ms,
        }
        print_json({**plan.to_json(), **more})
    else:
        _show(plan, stock, conditions, planning_ms)
    return 0


def _show(plan: Plan, stock: Plan | None, conditions: Conditions, planning_ms: float) -> None:
    plans = [plan]
    if stock is not None and stock.schedule.policy != plan.schedule.policy:
        plans.append(stock)
    rows = [
        (
            p.schedule.policy,
            ms(p.predicted),
            _times(stock, p.predicted),
            numbers(p.schedule.warmup),
            numbers(p.peak_in_flight),
        )
        for p in plans
    ]
    bounds = [("lower bound", plan.lower_bound)]
    free = unlimited_bound(conditions)
    if free < plan.lower_bound * (1 - 1e-9):
        bounds.append(("the same, any memory", free))
    rows += [(name, ms(bound), _times(stock, bound), "", "") for name, bound in bounds]
    gain = f"{stock.schedule.policy} / this" if stock else "gain"
    columns = ("policy", "iteration, ms", gain, "warmup depths", "peak in flight")
    show_table(Table("", columns, rows))
    say(plan.schedule.why)
    reached = (
        "no schedule is faster" if plan.gap < 5e-5 else f"{plan.gap:.1%} above the lower bound"
    )
    say(f"planned in {planning_ms:.0f} ms; {reached}")


def _times(stock: Plan | None, seconds: float) -> str:
    return f"{stock.predicted / seconds:.2f} x" if stock is not None and seconds else ""
