"""Training with one number of microbatches: the replan loop, and the program that is in force."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_adaptra.adapter.compat.compatibility import RECOMPUTE, SPLIT
from megatron_adaptra.adapter.compat.schedule_args import ScheduleArgs, message_of, models_of
from megatron_adaptra.adapter.pipeline.wiring import RankContext, Wiring
from megatron_adaptra.config import SPLITTING
from megatron_adaptra.errors import BadInput
from megatron_adaptra.ir.check import check
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Line, Schedule
from megatron_adaptra.ir.timeline import peak_in_flight
from megatron_adaptra.ir.unused_posts import first_posts, unused_posts
from megatron_adaptra.plan.initial import starting_schedule, trial
from megatron_adaptra.runtime.agreement import starting_ballot
from megatron_adaptra.runtime.controller import Controller, Member
from megatron_adaptra.runtime.leader import Leader
from megatron_adaptra.runtime.replan_policy import ReplanPolicy
from megatron_adaptra.telemetry.estimate import Estimator


class Run:
    """From its start on, the iteration to come has begun: all ranks know its `program`.

    `controller`: this rank's part in the replan loop. `microbatches`: per iteration. `iteration`:
    the first one of this run.
    `new_message()` makes an empty tensor for a message of the pipeline.
    """

    def __init__(
        self,
        context: RankContext,
        wiring: Wiring,
        controller: Controller,
        microbatches: int,
        iteration: int,
        new_message: Callable[[], torch.Tensor],
    ) -> None:
        self.wiring, self.controller, self.microbatches = wiring, controller, microbatches
        self._context = context
        self._schedule = controller.begin(iteration)
        wiring.mailbox.begin(iteration, new_message)
        self.program = lower(self._schedule, context.ahead)

    @property
    def line(self) -> Line:
        """This stage's ops in the iteration to come."""
        return self.program.order[self._context.stage]

    def begin(self, iteration: int, new_message: Callable[[], torch.Tensor]) -> None:
        """The boundary before `iteration`: its program, its first receives."""
        schedule = self.controller.begin(iteration)
        self.wiring.mailbox.begin(iteration, new_message)
        if schedule is not self._schedule:
            self.wiring.small_collectives.measure_again(self.wiring.plan_group.members)
            self._schedule, self.program = schedule, lower(schedule, self._context.ahead)
        for op in first_posts(self.program, self._context.stage):
            self.wiring.mailbox.post(op)

    def abandon(self) -> None:
        """End the run although an iteration has begun, as all ranks do: another one follows."""
        self.controller.close()
        self.wiring.mailbox.discard(unused_posts(self.program, self._context.stage))
        self.wiring.small_collectives.measure_again(self.wiring.plan_group.members)

    def close(self) -> None:
        """End the run and close its connections."""
        self.wiring.mailbox.close()
        self.controller.close()
        self.wiring.close()


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
    config, group = context.config, wiring.plan_group
    count, chunks = arguments["num_microbatches"], len(models_of(arguments))
    # An emulated link delays messages, not the word that a receive is posted.
    rendezvous = wiring.rendezvous and context.emulator is None
    split = executes and SPLIT not in group.limits
    recompute = config.recompute and RECOMPUTE not in group.limits
    resumed, new_message = _resumed(context, wiring, count), message_of(arguments)
    if config.policy in SPLITTING and SPLIT in group.limits:
        reason = group.limits[SPLIT]
        raise BadInput("policy", config.policy, f"not this model: {reason}; use 1f1b")
    start = starting_schedule(
        config.policy, context.stages, count, chunks, config.budget.microbatches, recompute
    )
    adapts = config.policy == "adaptive"
    # Of chunks the order is Megatron's: dropout falls as it does there.
    searches = adapts and executes and chunks == 1
    first_trial = trial(start, split, recompute) if searches and (split or recompute) else None
    ballot = starting_ballot(start, resumed, first_trial, iteration)
    controller: Controller
    if not group.leader:
        reports = group.leads(context.ranks)
        controller = Member(ballot, wiring.channels(), config.timeout, reports)
        return Run(context, wiring, controller, count, iteration, new_message)
    hosts, cores = _hosts_and_cores(context, wiring)
    estimator = Estimator(
        count, hosts, cores, new_message().nbytes, config.budget, rendezvous,
        context.emulator is None, chunks=chunks, split=split, recompute=recompute,
    )  # fmt: skip
    if resumed is not None and group.resumed is not None:
        estimator.resume(group.resumed["delays"])
    rule = ReplanPolicy(
        config.min_gain,
        policy="adaptive" if searches else "warmup",
        fixed=not adapts,
        sends="rendezvous" if rendezvous else "eager",
        ahead=context.ahead,
    )
    last = dist.get_world_size() - 1  # Megatron's own writers are there
    controller = Leader(
        start,
        ballot,
        wiring.channels(),
        estimator,
        rule,
        wiring.log,
        first=iteration,
        watcher=group.members.index(last) if last in group.members[1:] else None,
        announce=announce and group.members[0] == 0,
    )
    return Run(context, wiring, controller, count, iteration, new_message)


def _resumed(context: RankContext, wiring: Wiring, microbatches: int) -> Schedule | None:
    """A checkpoint's plan, if it is for this shape; a job may go on with another one."""
    resumed, budget = wiring.plan_group.resumed, context.config.budget.microbatches
    if resumed is None:
        return None
    schedule = Schedule.parse(resumed["schedule"])
    check(lower(schedule))
    peak = max(peak_in_flight(line, schedule.chunks) for line in schedule.order)
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
