"""`adaptra simulate`: how long a schedule takes, where it waits, and what jitter does to it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from itertools import groupby
from statistics import fmean, median
from typing import Any

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.base.units import size, whole
from megatron_adaptra.cli.job import Job, add_job
from megatron_adaptra.cli.output import Table, ms, print_json, progress, say, show_table
from megatron_adaptra.cli.planning import add_planning
from megatron_adaptra.cli.plugin import WARMUP
from megatron_adaptra.cli.replicas.shares import run_shares, wants_shares
from megatron_adaptra.cli.source import add_source, plan_from, sourced
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan import Plan
from megatron_adaptra.sim.clock import simulate
from megatron_adaptra.sim.jitter import draws

SAMPLES = 200  # where links have jitter and --samples is not given
MOST_ROWS = 32  # of the table of stages
MOST_DRAWN = 50_000_000  # ops of all samples; some minutes


def add_parser(subparsers: Any) -> None:
    """Add this command to the `subparsers` of argparse."""
    parser = subparsers.add_parser(
        "simulate",
        help="how long a schedule takes, and where it waits",
        description="Prove that a schedule can run within the activation budget, and time it. "
        "With --set link_jitter=X, time it under many sampled delays: in each sample every link "
        "has one delay each way for the whole iteration, lognormal around its own.",
        allow_abbrev=False,
    )
    add_source(parser)
    parser.add_argument(
        "--samples",
        type=whole,
        metavar="N",
        help=f"iterations to sample the delays of (default: {SAMPLES} where there is jitter)",
    )
    parser.add_argument(
        "--seed", type=whole, default=0, metavar="N", help="of the sampled delays (default: 0)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_job(parser)
    add_planning(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Time the schedule and print where it waits; the exit status.

    Raises BadInput for --samples where there is nothing to sample.
    """
    job, schedule = sourced(args)
    if wants_shares(args, job):
        return run_shares(args, job)
    if job.replicas is not None:
        from megatron_adaptra.cli.replicas.plan import simulate_replicas

        return simulate_replicas(args, job, schedule)
    with progress("simulating", lines=True) as at:
        result = _result(args, job, schedule, at)
    if args.json:
        print_json(result)
    else:
        _show(result)
    return 0


def _result(
    args: argparse.Namespace, job: Job, schedule: Schedule | None, at: Callable[[str], None]
) -> dict[str, Any]:
    at("the schedule")
    plan = plan_from(args, job, schedule)
    conditions = job.conditions
    jitter = any(link.jitter and link.delay for link in conditions.links.values())
    most = max(1, MOST_DRAWN // sum(map(len, plan.schedule.order)))
    count = args.samples if args.samples is not None else min(SAMPLES, most) * jitter
    if not 0 <= count <= most or (count and not jitter):
        allowed = "there is nothing to sample, as no link has jitter (--set link_jitter=X)"
        raise BadInput(
            "--samples", count, f"it has to be from 0 to {most} for this job" if jitter else allowed
        )
    at(f"{count} samples of the delays")
    return {
        "policy": plan.schedule.policy,
        "why": plan.schedule.why,
        "iteration_ms": 1e3 * plan.predicted,
        "lower_bound_ms": 1e3 * plan.lower_bound,
        "warmup": list(plan.schedule.warmup),
        "peak_in_flight": list(plan.peak_in_flight),
        "activation_budget": [None if math.isinf(b) else b for b in conditions.activation_budget],
        **_shares(plan, conditions),
        "peak_bytes": job.nbytes(plan.peak_in_flight),
        "samples": _sampled(plan, conditions, count, args.seed, args.sends) if count else None,
    }


def _shares(plan: Plan, conditions: Conditions) -> dict[str, list[float]]:
    """Per stage, compute and the rest, as shares of the iteration without its step."""
    seconds = plan.predicted - conditions.step_seconds
    busy = [plan.timeline.busy(stage) for stage in range(conditions.stages)]
    share = [b / seconds if seconds else 0.0 for b in busy]
    return {
        "busy_ms": [1e3 * b for b in busy],
        "busy_share": share,
        "bubble_share": [max(0.0, 1 - s) if seconds else 0.0 for s in share],
    }


def _sampled(
    plan: Plan, conditions: Conditions, count: int, seed: int, sends: str
) -> dict[str, float | int]:
    """The same schedule under `count` samples of the delays."""
    times = sorted(
        1e3 * simulate(plan.program, one, sends).makespan for one in draws(conditions, count, seed)
    )

    def quantile(share: float) -> float:
        return times[math.ceil(share * count) - 1]

    return {
        "count": count,
        "seed": seed,
        "mean_ms": fmean(times),
        "median_ms": median(times),
        "p90_ms": quantile(0.9),
        "p99_ms": quantile(0.99),
        "max_ms": times[-1],
    }


def _show(result: dict[str, Any]) -> None:
    time, bound = result["iteration_ms"], result["lower_bound_ms"]
    over = f", {time / bound:.3f} x the lower bound of {bound:.1f} ms" if bound else ""
    say(f"{result['policy'] or 'schedule'}: {time:.1f} ms{over}")
    if result["why"]:
        say(result["why"])
    if "warmup" in result["why"]:
        say(WARMUP)
    sizes = result["peak_bytes"]
    rows = zip(
        result["busy_ms"],
        result["busy_share"],
        result["bubble_share"],
        result["peak_in_flight"],
        [size(nbytes) for nbytes in sizes] if sizes else ["" for _ in result["busy_ms"]],
        result["activation_budget"],
        strict=True,
    )
    cells = [
        (
            ms(busy / 1e3),
            f"{100 * share:.1f} %",
            f"{100 * bubble:.1f} %",
            f"{peak:g}" + f" ({nbytes})" * bool(nbytes),
            "no limit" if budget is None else f"{budget:g}",
        )
        for busy, share, bubble, peak, nbytes, budget in rows
    ]
    columns = ("stage", "busy, ms", "busy", "bubble", "peak in flight", "budget")
    show_table(Table("", columns, _ranges(cells)))
    if result["samples"]:
        d = result["samples"]
        names = ("mean", "median", "p90", "p99", "max")
        values = (f"{time:.1f}", *(f"{d[f'{name}_ms']:.1f}" for name in names))
        row = (f"{d['count']} samples, seed {d['seed']}", *values)
        show_table(Table("", ("iteration, ms", "no jitter", *names), [row]))


def _ranges(cells: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """A row per stage; where they are many one for equal neighbours, and not all of them."""
    if len(cells) <= MOST_ROWS:
        return [(str(stage), *row) for stage, row in enumerate(cells)]
    rows, stage = [], 0
    for row, same in groupby(cells):
        last = stage + len(list(same)) - 1
        rows.append((f"{stage} to {last}" if last > stage else f"{stage}", *row))
        stage = last + 1
    if len(rows) > MOST_ROWS:
        half = MOST_ROWS // 2
        rows = [*rows[:half], ("...",) * len(rows[0]), *rows[-half:]]
    return rows
