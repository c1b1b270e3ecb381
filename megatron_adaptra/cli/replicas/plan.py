"""`adaptra plan` and `simulate` for several replicas: which microbatches run where, who waits."""

from __future__ import annotations

import argparse
import time

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.cli.job import Job, in_words
from megatron_adaptra.cli.output import print_json, progress, say, show_table
from megatron_adaptra.cli.replicas.figures import (
    EXPLAINED,
    decision,
    headline,
    hidden,
    move_table,
    plan_json,
    worker_table,
)
from megatron_adaptra.cli.replicas.source import (
    baselines,
    chosen_move,
    replica_plan,
    replica_plan_from,
)
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan.link_words import out_of_bandwidth
from megatron_adaptra.plan.routes.words import loads_in_words

IN_TRAINING = "in a training --adaptra-reroute makes such plans, from what is measured there"
DEAD = "; a dead worker still ends the training"


def run_replicas(args: argparse.Namespace, job: Job) -> int:
    """Plan a `job` of several replicas, prove that the plan can run, and print it; the status."""
    with progress("planning", lines=True) as at:
        at("1 of 2, moves between replicas")
        start = time.perf_counter()
        plan = replica_plan(args, job)
        planning_ms = 1e3 * (time.perf_counter() - start)
        at("2 of 2, 1F1B to compare with")
        base = baselines(plan.conditions, args.sends)
    move = chosen_move(plan)
    if args.json:
        print_json({**plan_json(plan, move, job, base), "planning_ms": planning_ms})
        return 0
    say(decision(move, plan.schedule))
    say(headline(plan, base))
    if args.explain:
        show_table(move_table(plan, job, base))
        say(EXPLAINED)
    table = worker_table(plan, job)
    show_table(table)
    last = IN_TRAINING + (DEAD if plan.conditions.failed else "")
    for line in (hidden(plan, table), out_of_bandwidth(plan.conditions.pipeline), last):
        if line:
            say(line)
    say(f"planned in {planning_ms:.0f} ms")
    return 0


def simulate_replicas(args: argparse.Namespace, job: Job, schedule: Schedule | None) -> int:
    """Time a schedule for a `job` of several replicas, and print it; the exit status.

    `schedule`: that was read; None to plan one. Raises BadInput for --samples: delays that vary
    are not planned across replicas.
    """
    if args.samples:
        allowed = "there is nothing to sample, as no path of several replicas has jitter"
        raise BadInput("--samples", args.samples, allowed)
    with progress("simulating", lines=True) as at:
        at("the schedule")
        plan = replica_plan_from(args, job, schedule)
        at("1F1B to compare with")
        base = baselines(plan.conditions, args.sends)
    if args.json:
        print_json(
            {
                **plan_json(plan, chosen_move(plan), job, base),
                "iteration_ms": 1e3 * plan.predicted,
                "policy": plan.schedule.policy,
            }
        )
        return 0
    say(in_words(job.conditions, job.replicas))
    say(f"{plan.schedule.policy or 'schedule'}: {headline(plan, base)}")
    say(loads_in_words(plan.schedule) or "every microbatch runs at home")
    table = worker_table(plan, job)
    show_table(table)
    if left := hidden(plan, table):
        say(left)
    return 0
