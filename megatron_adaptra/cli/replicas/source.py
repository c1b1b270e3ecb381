"""The schedule of several replicas that a command shows, planned or read, and its baselines."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import NamedTuple

from megatron_adaptra.base.errors import BadFile, BadInput
from megatron_adaptra.cli.job import Job
from megatron_adaptra.cli.planning import stock_of, time_limit_of
from megatron_adaptra.cli.source import refuse_stuck
from megatron_adaptra.ir.check import check
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan.routes.reroute import (
    NONE,
    REROUTE,
    SHIFT,
    SWAP,
    ReplicaPlan,
    evaluate_replicas,
    plan_replicas,
)

BEST = "adaptive"  # of --policy: the best move
SHARE = "share"  # of --policy: fewer microbatches for slow replicas
SOON = 100_000  # replicas x stages x microbatches that take a minute at the most
MOVES = (NONE, SWAP, SHIFT, REROUTE)


class Baselines(NamedTuple):
    """Baselines hold seconds of an iteration that a plan is compared with, or None.

    Args:
        healthy: of 1F1B while all workers and links are well.
        untreated: of 1F1B in every replica as things are; None where a worker is dead.
    """

    healthy: float | None
    untreated: float | None


def replica_plan(args: argparse.Namespace, job: Job) -> ReplicaPlan:
    """The plan of --policy for a `job` of several replicas, proven to run within its budgets.

    Raises BadInput for a policy that is no move, and for a move that the job does not have.
    """
    conditions, policy = job.replicas, args.policy
    assert conditions is not None  # the caller has looked
    if policy not in (BEST, *MOVES):
        allowed = f"across replicas it has to be one of {', '.join((BEST, *MOVES, SHARE))}"
        raise BadInput("--policy", policy, allowed)
    plan = plan_within(args, conditions)
    if policy != BEST:
        known = {move.name: move for move in plan.moves}
        if policy not in known:
            allowed = f"this job has no such plan, only {', '.join(known)}"
            raise BadInput("--policy", policy, allowed)
        chosen = evaluate_replicas(known[policy].schedule, conditions, args.sends)
        plan = replace(chosen, moves=plan.moves)
    check(plan.program, conditions.activation_budget)
    return plan


def plan_within(args: argparse.Namespace, conditions: ReplicaConditions) -> ReplicaPlan:
    """The best plan for `conditions`, as --sends and --time-limit say.

    Raises BadInput for one that takes minutes, if no time limit is given.
    """
    limit = time_limit_of(args)
    if limit is None and conditions.workers * conditions.microbatches > SOON:
        allowed = (
            f"more than {SOON} replicas x stages x microbatches take minutes; give the seconds "
            "that a search for better plans may take, or plan a smaller job"
        )
        raise BadInput("--time-limit", None, allowed)
    return plan_replicas(conditions, args.sends, limit)


def replica_plan_from(args: argparse.Namespace, job: Job, schedule: Schedule | None) -> ReplicaPlan:
    """The plan for a `job` of several replicas, proven to run within its budgets.

    `schedule`: that was read; None to plan one. Raises BadFile for one that cannot run.
    """
    conditions = job.replicas
    if schedule is None or conditions is None:
        return replica_plan(args, job)
    for worker in sorted(conditions.failed):
        if schedule.order[worker]:
            fault = f"it cannot run: worker {conditions.name(worker)} is dead, and has work there"
            raise BadFile("--schedule", args.schedule, fault)
    refuse_stuck(args, schedule, conditions.activation_budget)
    return evaluate_replicas(schedule, conditions, args.sends)


def healthy_seconds(conditions: ReplicaConditions, sends: str) -> float | None:
    """An iteration of 1F1B while all workers and links are well.

    `sends`: "eager" or "rendezvous".
    """
    stock = stock_of(conditions.pipeline.healthy(), sends)
    return None if stock is None else stock.predicted


def untreated(conditions: ReplicaConditions, sends: str) -> ReplicaPlan | None:
    """1F1B in every replica under the `conditions`; None where a worker of it is dead.

    `sends`: "eager" or "rendezvous".
    """
    stock = stock_of(conditions.pipeline, sends)
    if stock is None or conditions.failed:
        return None
    schedule = stock.schedule.replicated(conditions.replicas)
    return evaluate_replicas(schedule, conditions, sends)


def chosen_move(plan: ReplicaPlan) -> str:
    """The name of the move that `plan` makes; empty for a schedule that was read."""
    same = (move.name for move in plan.moves if move.schedule.same_as(plan.schedule))
    return next(same, "")


def baselines(conditions: ReplicaConditions, sends: str) -> Baselines:
    """Return the baselines of a plan for `conditions`; `sends`: "eager" or "rendezvous"."""
    stock = untreated(conditions, sends)
    return Baselines(healthy_seconds(conditions, sends), None if stock is None else stock.predicted)
