"""How a command plans a job: by which policy, in what time, and within the job's budget."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.base.units import brief, number, size
from megatron_adaptra.cli.job import Job
from megatron_adaptra.cli.once import Once
from megatron_adaptra.cli.profile import KEYS, unit_of
from megatron_adaptra.ir.check import SENDS, check
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.plan import PLANNERS, Plan, make_plan
from megatron_adaptra.plan.pipeline.base import least_time

UNASKED = 60.0  # seconds without any search that a plan takes only with a --time-limit
SOON = 20_000  # stages x microbatches x chunks that take seconds at the most
ROOM = 1e-9  # of a microbatch, as sums of shares differ in their last bits


def add_planning(parser: argparse.ArgumentParser, policy: bool = True) -> None:
    """The flags that say how to plan; with `policy`, by which planner."""
    group = parser.add_argument_group("how it is planned")
    if policy:
        names = ", ".join(sorted(PLANNERS))
        group.add_argument(
            "--policy",
            action=Once,
            default="adaptive",
            help=f"{names} (default: adaptive); with --replicas none, swap, shift, re-route or, "
            "the default, the fastest of these; or share, fewer microbatches for slow replicas "
            "(the default with --slow 2:2x)",
        )
        group.add_argument(
            "--counts",
            action=Once,
            metavar="N,...",
            help="with --policy share: microbatches of each replica, such as 9,9,5,9 (default: "
            "those with the fastest iteration)",
        )
    group.add_argument(
        "--sends",
        action=Once,
        choices=SENDS,
        default="eager",
        help="when a message leaves: eager, at once; rendezvous, once its receive is posted, as "
        "over gloo (default: eager)",
    )
    group.add_argument(
        "--time-limit",
        action=Once,
        metavar="S",
        help="seconds for making and proving a plan, at least those that it takes without a "
        "search. The plan then depends on the machine's speed "
        "(default: a fixed number of steps, the same plan everywhere, for jobs that take at most "
        f"{UNASKED:g} seconds without a search)",
    )


def plan_of(args: argparse.Namespace, conditions: Conditions, policy: str) -> Plan:
    """Plan the job with the named `policy`, as --sends and --time-limit say; raises BadInput."""
    if policy not in PLANNERS:
        raise BadInput("--policy", policy, f"it has to be one of {', '.join(sorted(PLANNERS))}")
    limit = time_limit_of(args)
    if limit is None:
        _refuse_long(conditions, args.sends)
    return make_plan(conditions, policy, args.sends, limit)


def proven_plan(args: argparse.Namespace, job: Job) -> Plan:
    """The plan of --policy, which can run within the job's budget.

    Raises BadInput, with the least budget that works where this does not.
    """
    budget = job.conditions.activation_budget
    try:
        plan = plan_of(args, job.conditions, args.policy)
    except BadInput as error:
        if error.field not in KEYS:
            raise
        raise BadInput(job.field(error.field), error.value, error.allowed) from None
    if any(peak > most + ROOM for peak, most in zip(plan.peak_in_flight, budget, strict=True)):
        least = _amounts(job, plan.peak_in_flight)
        any_policy = _amounts(job, (1.0,) * len(budget))
        fault = f"policy {args.policy} needs at least {least}; adaptive needs {any_policy}"
        raise BadInput(job.field("activation_budget"), job.budget, fault)
    check(plan.program, budget)
    return plan


def _amounts(job: Job, held: Sequence[float]) -> str:
    """Return activations as text: the most, or one per stage; microbatches or the budget's unit."""
    one = not isinstance(job.budget, (list, tuple))
    words = [job.budget] if one else job.budget
    units = {unit_of(word) for word in words if isinstance(word, str)}
    nbytes = job.nbytes(held)
    if units and nbytes:
        texts = [size(value, min(units)) for value in nbytes]
        return max(zip(nbytes, texts, strict=True))[1] if one else ",".join(texts)
    return f"{max(held):g}" if one else brief(held)


def _refuse_long(conditions: Conditions, sends: str) -> None:
    """Raise BadInput for a plan that takes minutes without a search, if no limit was given."""
    if conditions.stages * conditions.microbatches * conditions.chunks < SOON:
        return
    seconds, _ = least_time(conditions, sends)
    if seconds > UNASKED:
        allowed = (
            f"a plan of this size takes {seconds:.3g} s here without any search; give at least "
            f"{1.1 * seconds:.3g}, or plan a smaller job"
        )
        raise BadInput("--time-limit", None, allowed)


def time_limit_of(args: argparse.Namespace) -> float | None:
    """The seconds of --time-limit, None for none; raises BadInput."""
    if args.time_limit is None:
        return None
    try:
        seconds = number(args.time_limit)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise BadInput("--time-limit", args.time_limit, "it has to be a number of seconds above 0")
    return seconds


def stock_of(conditions: Conditions, sends: str) -> Plan | None:
    """Return the plan that stock Megatron runs; None for a shape that it refuses.

    `sends`: eager or rendezvous, as of --sends.
    """
    try:
        return make_plan(conditions, "interleaved" if conditions.chunks > 1 else "1f1b", sends)
    except BadInput:
        return None
