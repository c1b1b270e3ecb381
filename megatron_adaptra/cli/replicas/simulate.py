"""`adaptra simulate` for several replicas: how long a schedule takes, and who waits."""

from __future__ import annotations

import argparse

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.cli.job import Job, in_words
from megatron_adaptra.cli.output import print_json, progress, say, show_table
from megatron_adaptra.cli.replicas.figures import headline, hidden, plan_json, worker_table
from megatron_adaptra.cli.replicas.source import baselines, chosen_move, replica_plan_from
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan.routes.words import loads_in_words


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
