"""The start of a run: its first schedule, and this rank's part in the replan loop."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from megatron_adaptra.adapt.leader import Leader
from megatron_adaptra.adapt.log import DecisionLog
from megatron_adaptra.adapt.loop import Loop
from megatron_adaptra.adapt.pipeline.remedy import PipelineRemedy
from megatron_adaptra.adapt.routes.remedy import ALIKE, NO_ROUTES, RouteRemedy
from megatron_adaptra.adapt.schedules.advice import Advice
from megatron_adaptra.adapt.schedules.decisions import WARMUP as WARMUP_DEPTHS
from megatron_adaptra.adapt.schedules.decisions import PlanDecision
from megatron_adaptra.adapt.schedules.policy import ReplanPolicy
from megatron_adaptra.adapter.compat.schedule_args import (
    ScheduleArgs,
    message_bytes,
    message_of,
    models_of,
)
from megatron_adaptra.adapter.limits import (
    APART,
    MOVED,
    ORDER,
    RECOMPUTE,
    ROUTES,
    SPLIT,
    WARMUP,
    Case,
    why_not,
)
from megatron_adaptra.adapter.pipeline.cross_links import crossing
from megatron_adaptra.adapter.pipeline.job_gather import from_all_ranks, reason_anywhere
from megatron_adaptra.adapter.pipeline.op_watch import OpWatch
from megatron_adaptra.adapter.pipeline.pinned_vote import pin_first
from megatron_adaptra.adapter.pipeline.resumed import Fits, Unfit
from megatron_adaptra.adapter.pipeline.run import Run
from megatron_adaptra.adapter.pipeline.wiring import RankContext, Wiring
from megatron_adaptra.agree.agreement import Ballot, Proposal, starting_ballot
from megatron_adaptra.agree.bundle import LINKS, SCHEDULE, Bundle, Links, scheduled
from megatron_adaptra.agree.controller import Controller, Member
from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import AdaptraError, BadInput
from megatron_adaptra.config import SPLITTING
from megatron_adaptra.diagnose.finding import Worker
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.measure.estimate import Estimator
from megatron_adaptra.measure.replica_estimate import ReplicaEstimator
from megatron_adaptra.plan.pipeline.initial import over_own_messages, starting_schedule, trial

# Microbatches whose memory the first half of a backward may take besides, on a GPU: gradients of
# all that is kept for the second half, while nothing is freed. Measured: 0.4 to 1.2.
HALVES = 1.5
_LONGEST = 300  # characters of a reason


def start_run(
    context: RankContext,
    wiring: Wiring,
    arguments: ScheduleArgs,
    *,
    iteration: int,
    stock_until: int,
    executes: bool,
    announce: bool,
    resumes: bool,
    watch: OpWatch | None = None,
) -> tuple[Run | None, str]:
    """Begin with 1F1B, or a checkpoint's plan, for the number of microbatches of `arguments`.

    `iteration`: the one to come. `stock_until`: before this one Megatron runs over its own
    messages, whatever the run begins with. `executes`: whether our executor runs the iterations, so
    that the order may be any, or could in a job that observes. `announce`: whether decisions are
    logged. `resumes`: this is the job's first run, which begins with a checkpoint's plan if that
    fits. `watch`: of this rank's ops; once it has met other ranks, this rank agrees to no other
    order. Collective: where the start has failed on some rank there is no run, but the reason, the
    same everywhere, why Megatron has to run the pipeline. Raises BadInput for a policy that the
    model does not allow.
    """
    config, limits = context.config, wiring.plan_group.limits
    if config.policy in SPLITTING and SPLIT in limits:
        raise BadInput("policy", config.policy, f"not this model: {limits[SPLIT]}; use 1f1b")
    chunks = len(models_of(arguments))
    if pinned := why_not(ORDER, Case(config, arguments)):
        context.say(f"warmup stays as it is: {pinned}")
    pinned = pinned or limits.get(WARMUP, "")
    # A job that observes plans as one does that acts: what needs the executor for routes alone.
    could = executes and config.observes and (context.replicas == 1 or config.reroute != "auto")
    executes = executes and not could
    new_message = message_of(arguments)
    setup = _Setup(
        context,
        wiring,
        iteration,
        watch,
        microbatches=arguments["num_microbatches"],
        chunks=chunks,
        message_bytes=partial(message_bytes, arguments),
        # An emulated link delays messages, not the word that a receive is posted.
        rendezvous=wiring.rendezvous and context.emulator is None,
        split=executes and SPLIT not in limits,
        recompute=config.recompute and RECOMPUTE not in limits,
        executes=executes,
        # With chunks the order is Megatron's: dropout falls as it does there.
        searches=config.policy == "adaptive" and executes and chunks == 1,
        pinned=bool(pinned),
        could=could,
    )
    controller, digest, reason = None, "", ""
    try:
        controller, digest = context.guard.result(
            waits.START, setup.prepare, stock_until, announce, resumes
        )
        if not isinstance(getattr(controller, "ballot", None), Ballot):
            controller, reason = None, f"{controller!r} is no controller"
    except Exception as error:
        reason = repr(error)[:_LONGEST]
    reason = _agreed(wiring, str(digest), reason)
    if reason or controller is None:
        if controller is not None:
            context.guard.attempt(waits.END, controller.close)
        return None, f"adaptation cannot start: {reason}"
    return Run(context, wiring, controller, setup.microbatches, iteration, new_message), ""


def _agreed(wiring: Wiring, digest: str, reason: str) -> str:
    """Return why some rank cannot start, or an empty string. Collectives over all ranks.

    `digest`: of what this rank would begin with, the same in all of a plan group. `reason`: why
    this rank cannot.
    """
    if why := reason_anywhere(reason):
        return why
    gathered = from_all_ranks((wiring.plan_group.members[0], digest))
    for rank, (leader, other) in enumerate(gathered):
        if other != gathered[leader][1]:
            return f"rank {rank} would begin with another plan than rank {leader}"
    return ""


@dataclass(frozen=True)
class _Setup:
    """A _Setup makes one rank's part in the replan loop, from what plans of the run are made for.

    `watch`: see `start_run`. `executes`: our executor runs the ops. `searches`: plans may have any
    order of ops. `pinned`: the order has to stay Megatron's. `could`: our executor could run the
    ops, but is not asked to.
    """

    context: RankContext
    wiring: Wiring
    iteration: int
    watch: OpWatch | None
    microbatches: int
    chunks: int
    message_bytes: Callable[[], int]
    rendezvous: bool
    split: bool
    recompute: bool
    executes: bool
    searches: bool
    pinned: bool
    could: bool

    def prepare(self, stock_until: int, announce: bool, resumes: bool) -> tuple[Controller, str]:
        """Return this rank's controller, and a digest of what it begins with; see `start_run`."""
        context, wiring, watch, iteration = self.context, self.wiring, self.watch, self.iteration
        group, channels, store = wiring.plan_group, wiring.channels, wiring.store
        if channels is None or store is None or wiring.log is None:
            raise AdaptraError("control is not open")  # the guard has logged why
        start = self._start()
        resumed, delays = self._resumed(start) if resumes else (None, {})
        tries = self.searches and (self.split or self.recompute) and not start.stock
        tries = tries and (watch is None or watch.watched)  # one replica alone may try
        first_trial = trial(start, self.split, self.recompute) if tries else None
        links, cross = None, wiring.cross
        if cross is not None:  # all ranks open those of a checkpoint's plan now
            links = Links(crossing(resumed or start))
            opening = Proposal(-1, iteration, Bundle({LINKS: links}), f"{group.serial}/{iteration}")
            cross.open(opening, opening.bundle)
        ballot = starting_ballot(start, resumed, first_trial, iteration, links)
        if iteration < stock_until:
            stock = starting_schedule(
                "adaptive", context.stages, self.microbatches, self.chunks, math.inf, False
            )
            ballot = Ballot(ballot.lasting, scheduled(over_own_messages(stock)), stock_until)
        pinned: Callable[[Proposal], None] | None = None
        if (staging := wiring.staging) is not None:
            name = f"stage {context.stage} (rank {dist.get_rank()})"
            pinned = partial(
                pin_first, staging, name, context.worker, context.ahead, self.message_bytes()
            )
            for bundle in (ballot.in_force, ballot.lasting):  # which take no vote
                pinned(Proposal(-1, iteration, bundle))

        def ready(proposal: Proposal) -> None:
            schedule = proposal.bundle.values.get(SCHEDULE)
            other = isinstance(schedule, Schedule) and schedule.order != start.order
            if watch is not None and watch.met and other:  # ops meet other replicas
                raise AdaptraError(f"the order of ops stays as it is: {watch.met.why}")
            if cross is not None:
                cross.open(proposal, ballot.lasting)
            if pinned is not None:
                pinned(proposal)

        prepare = ready if watch or cross or pinned else None
        digest = f"{ballot.in_force.digest} {ballot.lasting.digest}"
        if not group.leader:
            reports = group.leads(context.workers)
            member = Member(
                ballot, channels, store, context.config.timeout, first=iteration, reports=reports,
                prepare=prepare,
            )  # fmt: skip
            return member, digest
        last = dist.get_world_size() - 1  # Megatron's own writers are there
        loop = self._loop(start, ballot.lasting[SCHEDULE], delays, wiring.log, announce)
        watcher = group.members.index(last) if last in group.members[1:] else None
        leader = Leader(
            ballot, channels, store, loop, first=iteration, watcher=watcher, prepare=prepare
        )
        return leader, digest

    def _loop(
        self,
        start: Schedule,
        first: Schedule,
        delays: Mapping[str, float],
        log: DecisionLog[PlanDecision],
        announce: bool,
    ) -> Loop[Any]:
        """Make the loop that plans on the leader, with its `log`.

        `first`: what the job begins with; `delays`: that it was made for.
        """
        context, group, diagnosis = self.context, self.wiring.plan_group, self.wiring.diagnosis
        workers = [Worker(rank, group.names[rank]) for rank in context.workers]
        rule, peaks, estimators = self._policy(), first.peak_in_flight(), []
        for worker in range(0, len(workers), context.stages):
            estimators.append(self._estimator(peaks, worker))
            estimators[-1].resume(delays)
        remedy: PipelineRemedy | RouteRemedy
        if context.replicas > 1:
            every = ReplicaEstimator(estimators)
            remedy = RouteRemedy(start, every, rule, log, workers, self._mode, diagnosis)
        else:
            remedy = PipelineRemedy(start, estimators[0], rule, log, workers, diagnosis)
        if context.config.observes:
            free = self.could and not (self.pinned or rule.fixed) and context.replicas == 1
            kinds = (kind not in group.limits for kind in (SPLIT, RECOMPUTE))
            remedy.advice = Advice(rule, free, *kinds)
        return Loop(remedy, announce=self._announce if announce else None, acts=context.acts)

    def _announce(self, line: str) -> None:
        """Have rank 0 log a `line` on the plan of this replica, or of all that have one plan."""
        of_all, replica = line == WARMUP_DEPTHS, self.context.job_replica  # once for all of them
        text = line if of_all or not replica else f"replica {replica}: {line}"
        self.context.job_log.say(text, once=of_all)

    @property
    def _mode(self) -> str:
        limits = self.wiring.plan_group.limits
        return mode_of(self.context.config.reroute, limits, self.executes)

    def _start(self) -> Schedule:
        config, own = self.context.config, self.context.over_own_messages
        most = math.inf if own else config.budget.microbatches
        start = starting_schedule(
            config.policy, self.context.stages, self.microbatches, self.chunks, most, self.recompute
        )
        start = start.replicated(self.context.replicas)
        if own and config.policy not in SPLITTING:
            return over_own_messages(start)
        return start

    def _policy(self) -> ReplanPolicy:
        policy = "adaptive" if self.searches else "warmup"
        if self.pinned:
            policy = "interleaved" if self.chunks > 1 else "1f1b"
        return ReplanPolicy(
            self.context.config.min_gain,
            policy=policy,
            fixed=self.context.config.policy != "adaptive",
            sends="rendezvous" if self.rendezvous else "eager",
            ahead=self.context.ahead,
            halves=HALVES if self.context.device.behind else 0.0,
            stock_sends="rendezvous" if self.context.emulator is None else "eager",
        )

    def _estimator(self, at_first: Sequence[float], first: int) -> Estimator:
        """Make the estimator of the pipeline whose workers are numbered from `first` on.

        `at_first`: microbatches per worker that fit, as the job begins with so many.
        """
        context = self.context
        own = slice(first, first + context.stages)
        hosts, cores = _hosts_and_cores(self.wiring, context.workers[own])
        return Estimator(
            self.microbatches, hosts, cores, self.message_bytes(), context.budget, self.rendezvous,
            context.emulator is None or context.device.behind, chunks=self.chunks,
            split=self.split, recompute=self.recompute, at_first=at_first[own],
            on_device=context.device.behind, first=first,
        )  # fmt: skip

    def _resumed(self, start: Schedule) -> tuple[Schedule | None, dict[str, float]]:
        """Return a checkpoint's plan, if it fits, and its delays: on all ranks alike."""
        state, context = self.wiring.plan_group.resumed, self.context
        if state is None:
            return None, {}
        halves = {Kind.I, Kind.W} if self.split else set()
        kinds = {Kind.F, Kind.B} | halves | ({Kind.R} if self.recompute else set())
        adapts = context.config.policy == "adaptive"
        try:
            fits = Fits(start, adapts, kinds, self.searches, context.budget)
            schedule, delays = fits.take(state)
            if self.pinned and schedule.order != start.order:
                raise Unfit("the warmup stays as it is")
            if not allows(self._mode, schedule):
                raise Unfit("it has routes between replicas that this job cannot have")
            return schedule, delays
        except Unfit as error:
            context.say(
                f"the checkpoint's plan does not fit, starting from {start.policy}: {error}"
            )
            return None, {}


def mode_of(asked: str, found: Mapping[str, str], executes: bool) -> str:
    """Choose the mode of routes: as `asked`, or narrower by the `found` limits of all ranks.

    `executes`: our executor runs the ops; Megatron's own schedule has one order.
    """
    if found.get(APART):
        return ALIKE
    if found.get(ROUTES) or found.get(WARMUP):
        return NO_ROUTES
    return asked if executes and not found.get(MOVED) else "swap"


def allows(mode: str, schedule: Schedule) -> bool:
    """Return whether a plan of this `mode` may be this `schedule`."""
    if mode == ALIKE:
        return schedule.alike
    if mode == "auto" or not schedule.routes.moved:
        return True
    return mode == "swap" and schedule.keeps_order


def _hosts_and_cores(wiring: Wiring, ranks: Sequence[int]) -> tuple[list[str], float | None]:
    """Return by stage the machine's identity, and the cores that the pipeline of `ranks` has.

    None for the cores where each stage has enough.
    """
    everywhere, stages = wiring.plan_group.clock_ids, len(ranks)
    hosts = [everywhere[rank] for rank in ranks]
    if wiring.device.type == "cuda" or len(set(hosts)) > 1:
        return hosts, None
    cores = len(os.sched_getaffinity(0)) * stages / everywhere.count(hosts[0])
    return hosts, cores if cores < stages else None
