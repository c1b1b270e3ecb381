"""`adaptra simulate`: how long a schedule takes, where it waits, and what jitter does to it."""

from __future__ import annotations

import argparse
import math
from statistics import fmean, median
from typing import Any

from megatron_adaptra.cli.job import add_job
from megatron_adaptra.cli.output import Table, ms, print_json, say, show_table
from megatron_adaptra.cli.source import add_source, planned_or_read
from megatron_adaptra.errors import BadInput
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.plan import Plan
from megatron_adaptra.sim.clock import simulate
from megatron_adaptra.sim.jitter import draws
from megatron_adaptra.units import whole

SAMPLES = 200  # where links have jitter and --samples is not given
MOST_DRAWN = 50_000_000  # ops of all samples; some minutes


def add_parser(subparsers: Any) -> None:
    """Add this command to the `subparsers` of argparse."""
    parser = subparsers.add_parser(
        "simulate",
        help="how long a schedule takes, and where it waits",
        description="Prove that a schedule can run within the activation budget, and time it. "
        "With --link-jitter, time it under many sampled delays: in each sample every directed link "
        "has one delay for the whole iteration, lognormal around the link's delay.",
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Time the schedule and print where it waits; the exit status.

    Raises BadInput for --samples where there is nothing to sample.
    """
    plan, conditions = planned_or_read(args)
    jitter = any(link.jitter and link.delay for link in conditions.links.values())
    most = max(1, MOST_DRAWN // sum(map(len, plan.schedule.order)))
    count = args.samples if args.samples is not None else min(SAMPLES, most) * jitter
    if not 0 <= count <= most or (count and not jitter):
        allowed = "there is nothing to sample, as no link has jitter (see --link-jitter)"
        raise BadInput(
            "--samples", count, f"it has to be from 0 to {most} for this job" if jitter else allowed
        )
    result = {
        "policy": plan.schedule.policy,
        "why": plan.schedule.why,
        "iteration_ms": 1e3 * plan.predicted,
        "lower_bound_ms": 1e3 * plan.lower_bound,
        "warmup": list(plan.schedule.warmup),
        "peak_in_flight": list(plan.peak_in_flight),
        "activation_budget": [None if math.isinf(b) else b for b in conditions.activation_budget],
        **_shares(plan, conditions),
        "samples": _sampled(plan, conditions, count, args.seed, args.sends) if count else None,
    }
    if args.json:
        print_json(result)
    else:
        _show(result)
    return 0


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
    rows = zip(
        result["busy_ms"],
        result["busy_share"],
        result["bubble_share"],
        result["peak_in_flight"],
        result["activation_budget"],
        strict=True,
    )
    columns = ("stage", "busy, ms", "busy", "bubble", "peak in flight", "budget")
    shown = [
        (
            str(stage),
            ms(busy / 1e3),
            f"{100 * share:.1f} %",
            f"{100 * bubble:.1f} %",
            f"{peak:g}",
            "no limit" if budget is None else f"{budget:g}",
        )
        for stage, (busy, share, bubble, peak, budget) in enumerate(rows)
    ]
    show_table(Table("", columns, shown))
    if result["samples"]:
        d = result["samples"]
        names = ("mean", "median", "p90", "p99", "max")
        values = (f"{time:.1f}", *(f"{d[f'{name}_ms']:.1f}" for name in names))
        row = (f"{d['count']} samples, seed {d['seed']}", *values)
        show_table(Table("", ("iteration, ms", "no jitter", *names), [row]))
