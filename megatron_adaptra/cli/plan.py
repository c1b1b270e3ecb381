"""`adaptra plan`: the best schedule for a job, and what it gains over the one Megatron runs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.base.units import brief, size
from megatron_adaptra.cli.job import Job, add_job, job_of
from megatron_adaptra.cli.output import Table, ms, print_json, progress, say, show_table
from megatron_adaptra.cli.planning import add_planning, plan_of, proven_plan, stock_of
from megatron_adaptra.cli.plugin import (
    DEFAULT,
    STOCK,
    WARMUP,
    default_plan,
    flags_of_plan,
    kept_in_words,
    stays_stock,
)
from megatron_adaptra.cli.replicas.failures import add_failures, run_failures
from megatron_adaptra.cli.replicas.shares import run_shares, wants_shares
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.model.bounds import unlimited_bound
from megatron_adaptra.plan import Plan
from megatron_adaptra.plan.link_words import out_of_bandwidth


def add_parser(subparsers: Any) -> None:
    """Add this command to the `subparsers` of argparse."""
    parser = subparsers.add_parser(
        "plan",
        help="the schedule that a job with slow links should run",
        description="Plan the schedule of a job whose links may be slow, and predict its time.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--explain",
        action="store_true",
        help="with --replicas: what each move gains, and what it costs in memory and messages",
    )
    add_job(parser)
    add_planning(parser)
    add_failures(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan, prove that the plan can run, and print it; the exit status.

    Raises BadInput for flags of several replicas where there is one.
    """
    job = job_of(args)
    if args.failure_plans is not None and args.failures is None:
        raise BadInput("--failure-plans", args.failure_plans, "it keeps plans; give --failures")
    if wants_shares(args, job):
        return run_shares(args, job)
    if job.replicas is not None and args.failures is not None:
        return run_failures(args, job)
    if job.replicas is not None:
        from megatron_adaptra.cli.replicas.plan import run_replicas

        return run_replicas(args, job)
    if args.failures is not None:
        raise BadInput(
            "--failures", args.failures, "workers take over from others; give --replicas"
        )
    if args.explain:
        raise BadInput("--explain", True, "it compares moves between replicas; give --replicas")
    conditions = job.conditions
    with progress("planning", lines=True) as at:
        at(f"1 of 3, policy {args.policy}")
        start = time.perf_counter()
        plan = proven_plan(args, job)
        planning_ms = 1e3 * (time.perf_counter() - start)

        def made(conditions: Conditions, policy: str) -> Plan:
            """Return the plan that was made already if it is of `policy`, else make one."""
            at(f"2 of 3, policy {policy}, which runs by default")
            return plan if args.policy == policy else plan_of(args, conditions, policy)

        default = default_plan(conditions, args.sends, made)
        at("3 of 3, stock Megatron to compare with")
        stock = stock_of(conditions, args.sends)
    if args.json:
        more = {
            "unlimited_bound_ms": 1e3 * unlimited_bound(conditions),
            "stock_ms": None if stock is None else 1e3 * stock.predicted,
            "default_engine_ms": None if default is None else 1e3 * default.predicted,
            "peak_bytes": job.nbytes(plan.peak_in_flight),
            "planning_ms": planning_ms,
        }
        print_json({**plan.to_json(), **more})
    else:
        _show(job, plan, default, stock, planning_ms, args.sends)
    return 0


def _show(
    job: Job,
    plan: Plan,
    default: Plan | None,
    stock: Plan | None,
    planning_ms: float,
    sends: str,
) -> None:
    conditions = job.conditions
    alike = stays_stock(default, stock)
    plans = [(f"{DEFAULT}, or {STOCK}" if alike else DEFAULT, default)] if default else []
    if default is None or not plan.schedule.same_as(default.schedule):
        plans.append((flags_of_plan(plan, sends), plan))
    if stock is not None and not alike and plan.schedule.policy != stock.schedule.policy:
        plans.append((STOCK, stock))
    rows = [
        (
            p.schedule.policy,
            flags,
            ms(p.predicted),
            _times(stock, p.predicted),
            brief(p.schedule.warmup, whole=True),
            brief(p.peak_in_flight, whole=True),
            _most(job, p),
        )
        for flags, p in plans
        if p is not None
    ]
    bounds = [("lower bound", plan.lower_bound)]
    free = unlimited_bound(conditions)
    if free < plan.lower_bound * (1 - 1e-9):
        bounds.append(("the same, any memory", free))
    rows += [(name, "", ms(bound), _times(stock, bound), "", "", "") for name, bound in bounds]
    gain = f"{stock.schedule.policy} / this" if stock else "gain"
    columns = ["policy", "flags in training", "iteration, ms", gain, "warmup depths"]
    columns += ["peak in flight", "most memory"]
    kept = len(columns) - (job.activation_bytes is None)
    show_table(Table("", columns[:kept], [row[:kept] for row in rows]))
    thin = out_of_bandwidth(conditions)
    for line in (plan.schedule.why, thin, kept_in_words(default), *_explained(rows)):
        if line:
            say(line)
    reached = (
        "it takes as long as the lower bound, which no schedule can beat"
        if plan.gap < 5e-5
        else f"it takes {plan.gap:.1%} longer than the lower bound"
    )
    say(f"{plan.schedule.policy} was planned in {planning_ms:.0f} ms; {reached}")


def _explained(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Give the sentences that explain the columns."""
    yield f"{WARMUP}; peak in flight: microbatches whose activations a stage holds"
    if any(" x " in row[4] or " x " in row[5] for row in rows):
        yield "stages from first to last; 26 x 64: 64 stages in a row with 26 each"


def _most(job: Job, plan: Plan) -> str:
    """Return the bytes of activations on the stage that holds most; empty where not known."""
    nbytes = job.nbytes(plan.peak_in_flight)
    return "" if nbytes is None else size(max(nbytes))


def _times(stock: Plan | None, seconds: float) -> str:
    return f"{stock.predicted / seconds:.2f} x" if stock is not None and seconds else ""
