"""What a run begins with: the first schedule, and this rank's part in the replan loop."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch.distributed as dist

from megatron_adaptra.adapter.compat.schedule_args import ScheduleArgs, message_of, models_of
from megatron_adaptra.adapter.pipeline.compatibility import RECOMPUTE, SPLIT
from megatron_adaptra.adapter.pipeline.run import Run
from megatron_adaptra.adapter.pipeline.wiring import RankContext, Wiring
from megatron_adaptra.config import SPLITTING
from megatron_adaptra.errors import BadInput
from megatron_adaptra.ir.check import check
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan.initial import starting_schedule, trial
from megatron_adaptra.runtime.agreement import starting_ballot
from megatron_adaptra.runtime.controller import Controller, Member
from megatron_adaptra.runtime.leader import Leader
from megatron_adaptra.runtime.replan_policy import ReplanPolicy
from megatron_adaptra.telemetry.estimate import Estimator


@dataclass(frozen=True)
class _Means:
    """What plans of a run are made for. `searches`: plans may have any order of ops."""

    microbatches: int
    chunks: int
    rendezvous: bool
    split: bool
    recompute: bool
    searches: bool


def start_run(
    context: RankContext,
    wiring: Wiring,
    arguments: ScheduleArgs,
    *,
    iteration: int,
    executes: bool,
    announce: bool,
) -> Run:
    """Begin with 1F1B, or a checkpoint's plan, for the number of microbatches of `arguments`.

    `iteration`: the one to come. `executes`: whether our executor runs the iterations, so that the
    order may be any. `announce`: whether decisions are said aloud. Raises BadInput for a policy
    that the model does not allow.
    """
    config, group, chunks = context.config, wiring.plan_group, len(models_of(arguments))
    means = _Means(
        microbatches=arguments["num_microbatches"],
        chunks=chunks,
        # An emulated link delays messages, not the word that a receive is posted.
        rendezvous=wiring.rendezvous and context.emulator is None,
        split=executes and SPLIT not in group.limits,
        recompute=config.recompute and RECOMPUTE not in group.limits,
        # Of chunks the order is Megatron's: dropout falls as it does there.
        searches=config.policy == "adaptive" and executes and chunks == 1,
    )
    start, new_message = _starting(context, wiring, means), message_of(arguments)
    resumed = _resumed(context, wiring, means.microbatches)
    tries = means.searches and (means.split or means.recompute)
    first_trial = trial(start, means.split, means.recompute) if tries else None
    ballot = starting_ballot(start, resumed, first_trial, iteration)
    controller: Controller
    if group.leader:
        estimator = _estimator(context, wiring, means, new_message().nbytes)
        if resumed is not None and group.resumed is not None:
            estimator.resume(group.resumed["delays"])
        last = dist.get_world_size() - 1  # Megatron's own writers are there
        controller = Leader(
            start,
            ballot,
            wiring.channels(),
            estimator,
            _policy(context, means),
            wiring.log,
            first=iteration,
            watcher=group.members.index(last) if last in group.members[1:] else None,
            announce=announce and group.members[0] == 0,
        )
    else:
        reports = group.leads(context.ranks)
        controller = Member(ballot, wiring.channels(), config.timeout, reports)
    return Run(context, wiring, controller, means.microbatches, iteration, new_message)


def _starting(context: RankContext, wiring: Wiring, means: _Means) -> Schedule:
    config, limits = context.config, wiring.plan_group.limits
    if config.policy in SPLITTING and SPLIT in limits:
        raise BadInput("policy", config.policy, f"not this model: {limits[SPLIT]}; use 1f1b")
    return starting_schedule(
        config.policy, context.stages, means.microbatches, means.chunks,
        config.budget.microbatches, means.recompute,
    )  # fmt: skip


def _policy(context: RankContext, means: _Means) -> ReplanPolicy:
    return ReplanPolicy(
        context.config.min_gain,
        policy="adaptive" if means.searches else "warmup",
        fixed=context.config.policy != "adaptive",
        sends="rendezvous" if means.rendezvous else "eager",
        ahead=context.ahead,
    )


def _estimator(
    context: RankContext, wiring: Wiring, means: _Means, message_bytes: int
) -> Estimator:
    hosts, cores = _hosts_and_cores(context, wiring)
    return Estimator(
        means.microbatches, hosts, cores, message_bytes, context.config.budget, means.rendezvous,
        context.emulator is None, chunks=means.chunks, split=means.split,
        recompute=means.recompute,
    )  # fmt: skip


def _resumed(context: RankContext, wiring: Wiring, microbatches: int) -> Schedule | None:
    """A checkpoint's plan, if it is for this shape; a job may go on with another one."""
    resumed, budget = wiring.plan_group.resumed, context.config.budget.microbatches
    if resumed is None:
        return None
    schedule = Schedule.parse(resumed["schedule"])
    check(lower(schedule))
    peak = max(schedule.peak_in_flight())
    shape = schedule.stages, schedule.microbatches
    if shape == (context.stages, microbatches) and peak <= budget:
        return schedule
    context.notices.line("the checkpoint's plan does not fit this job; starting from 1F1B")
    return None


def _hosts_and_cores(context: RankContext, wiring: Wiring) -> tuple[list[str], float | None]:
    """Stage by stage the machine's identity, and the cores this pipeline can count on.

    None where each stage has cores enough.
    """
    everywhere = wiring.plan_group.hosts
    hosts = [everywhere[rank] for rank in context.ranks]
    if wiring.device.type == "cuda" or len(set(hosts)) > 1:
        return hosts, None
    cores = len(os.sched_getaffinity(0)) * context.stages / everywhere.count(hosts[0])
    return hosts, cores if cores < context.stages else None
