"""`adaptra plan --replicas --failures`: what to run while workers are missing, planned ahead."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.base.units import whole
from megatron_adaptra.cli.job import Job
from megatron_adaptra.cli.output import Table, ms, print_json, progress, say, show_table
from megatron_adaptra.cli.replicas.source import healthy_seconds
from megatron_adaptra.plan.failures import FailurePlan, failure_plans, stored_failure_plans

PLACES = (
    "a healthy worker of another stage can take a dead one's place, once it has copied a peer's "
    "parameters; so one plan for each number of failures is enough"
)


def add_failures(parser: argparse.ArgumentParser) -> None:
    """Add the flags of plans for failures to come to the `parser` of `adaptra plan`."""
    group = parser.add_argument_group("plans for failures to come")
    group.add_argument(
        "--failures",
        type=whole,
        metavar="N",
        help="with --replicas: plan for 1 to N dead workers, each at the stages where they cost "
        "least",
    )
    group.add_argument(
        "--failure-plans",
        metavar="FOLDER",
        help="with --failures: read these plans from there, or make and keep them there",
    )


def run_failures(args: argparse.Namespace, job: Job) -> int:
    """Plan for failures of a `job` of several replicas, and print the plans; the exit status.

    Raises BadInput for more failures than leave each stage a worker, and for flags that do not go
    with this; BadFile for a folder that cannot be written.
    """
    conditions = job.replicas
    assert conditions is not None  # the caller has looked
    if args.explain:
        raise BadInput("--explain", True, "it compares moves of one plan; leave out --failures")
    most = sum(len(conditions.alive(stage)) - 1 for stage in range(conditions.stages))
    if not 1 <= args.failures <= most:
        allowed = f"it has to be from 1 to {most}, as each stage keeps a worker"
        raise BadInput("--failures", args.failures, allowed)
    folder = None if args.failure_plans is None else Path(args.failure_plans)
    with progress("planning", lines=True) as at:
        if folder is None:
            plans = failure_plans(conditions, args.failures, args.sends, at)
        else:
            plans = stored_failure_plans(folder, conditions, args.failures, args.sends, at)
    healthy = healthy_seconds(conditions, args.sends)
    if args.json:
        print_json({"healthy_ms": None if healthy is None else 1e3 * healthy,
                    "failures": [_json(plan) for plan in plans]})  # fmt: skip
        return 0
    show_table(_table(plans, healthy))
    say(PLACES)
    if folder is not None:
        say(f"kept in {folder}")
    return 0


def _table(plans: Sequence[FailurePlan], healthy: float | None) -> Table:
    rows = []
    for plan in plans:
        dead = [f"{count} of stage {stage}" for stage, count in enumerate(plan.vector) if count]
        ratio = f"{plan.seconds / healthy:.3f}" if healthy else ""
        cells = (ms(plan.seconds), ratio, plan.schedule.policy)
        rows.append((str(sum(plan.vector)), ", ".join(dead), *cells))
    return Table("", ("failures", "best place", "iteration, ms", "x healthy 1F1B", "move"), rows)


def _json(plan: FailurePlan) -> dict[str, object]:
    return {
        "failures": sum(plan.vector),
        "dead_per_stage": list(plan.vector),
        "predicted_ms": 1e3 * plan.seconds,
        "schedule": plan.schedule.to_json(),
    }
