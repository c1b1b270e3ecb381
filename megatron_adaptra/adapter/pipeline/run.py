"""Training with one number of microbatches: the replan loop, and the program that is in force."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from megatron_adaptra.adapter.pipeline.pinned_vote import messages_at_once, waits_for_vote
from megatron_adaptra.adapter.pipeline.wiring import RankContext, Wiring
from megatron_adaptra.agree.bundle import LINKS, SCHEDULE, Bundle
from megatron_adaptra.agree.controller import Controller
from megatron_adaptra.base import waits
from megatron_adaptra.base.log import log_line
from megatron_adaptra.device.staging import Staging
from megatron_adaptra.ir.program import first_posts, lower, unused_posts
from megatron_adaptra.ir.schedule import Line, Schedule


class Run:
    """A run trains by plans: all ranks always know the `program` of the iteration to come.

    `controller`: this rank's part in the replan loop. `microbatches`: per iteration. `iteration`:
    the first one of this run. `new_message()` makes an empty tensor for a message of the pipeline.
    `ran`: the schedule of the last iteration that is over. `abandoned`: it has ended, and Megatron
    runs what comes until another one begins.
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
        self._context, self._in_force = context, controller.ballot.in_force
        self._linked: Bundle | None = None  # the last one whose links were taken
        self.abandoned = False
        self._unknown: set[int] = set()  # workers whose links' bandwidth is not measured any more
        self._schedule = self.ran = self._next(iteration)
        self.program = lower(self._schedule, context.ahead)
        wiring.mailbox.begin(iteration, new_message, self.program.routes)

    @property
    def line(self) -> Line:
        """This worker's ops in the iteration to come."""
        return self.program.order[self._context.worker]

    @property
    def stock(self) -> bool:
        """True where Megatron runs the iteration to come over its own messages."""
        return self._schedule.stock

    @property
    def by_home(self) -> bool:
        """True where microbatches leave their order, so that random numbers go by their homes.

        Elsewhere, in whole swaps too, an op draws what stock's n-th op draws.
        """
        return not self._schedule.keeps_order

    @property
    def idle(self) -> list[int]:
        """The workers of the last stage that run nothing in the iteration to come."""
        order, stages = self.program.order, self._context.stages
        return [worker for worker in range(stages - 1, len(order), stages) if not order[worker]]

    def begin(self, iteration: int, new_message: Callable[[], torch.Tensor]) -> None:
        """Begin `iteration`: take its program, and post its first receives."""
        schedule = self._next(iteration)
        self.ran = before = self._schedule
        self._schedule = schedule
        if schedule is not before:
            self.wiring.small_collectives.measure_again(self.wiring.plan_group.members)
            self.program = lower(schedule, self._context.ahead)
        self.wiring.mailbox.begin(iteration, new_message, self.program.routes)
        if self.wiring.staging is not None:
            self._context.guard.call(
                self._stage, self.wiring.staging, before, iteration, new_message
            )
        if not self.stock:
            for op in first_posts(self.program, self._context.worker):
                self.wiring.mailbox.post(op)

    def _stage(
        self,
        staging: Staging,
        before: Schedule,
        iteration: int,
        new_message: Callable[[], torch.Tensor],
    ) -> None:
        """Pin memory for the `iteration` to come; free what neither it nor a vote needs."""
        if self._schedule is not before:
            staging.new_peak()
        if before.stock and not self.stock:  # pinning takes a while
            count = messages_at_once(self.program, self._context.worker)
            staging.prepare(new_message().nbytes, count)
        if not waits_for_vote(staging, self.controller.ballot, iteration):
            staging.trim(self.stock)

    def probe_links(self, first: bool) -> None:
        """Send what measures the links; on the guard's thread, as often on all stages.

        `first`: for the first time in this iteration.
        """
        if (probes := self.wiring.probes) is None:
            return
        for source in probes.faults.keys() - self._unknown:
            self._unknown.add(source)
            name = self.program.routes.name
            log_line(
                f"{name(self._context.worker)}: the bandwidth of the link from {name(source)} is "
                f"not measured any more, its probes have failed: {probes.faults[source]}"
            )
        probes.exchange(self.microbatches if first and self.stock else 0)

    def abandon(self) -> None:
        """End the run although an iteration has begun, as all ranks do.

        Another one follows, over the same connections, perhaps some iterations later. Once is
        enough.
        """
        if self.abandoned:
            return
        self.abandoned = True
        self._context.guard.attempt(waits.END, self.controller.close)
        if not self.stock:
            self.wiring.mailbox.discard(unused_posts(self.program, self._context.worker))
        self.wiring.small_collectives.measure_again(self.wiring.plan_group.members)

    def close(self) -> None:
        """End the run and close its connections."""
        with contextlib.ExitStack() as stack:  # each is called, even if one before has failed
            stack.callback(self.wiring.close)
            if not self.abandoned:
                stack.callback(self._context.guard.attempt, waits.END, self.controller.close)
            stack.callback(self.wiring.mailbox.close)

    def _next(self, iteration: int) -> Schedule:
        """Return the agreed schedule of `iteration`; where that fails, the schedule in force."""
        guard = self._context.guard
        self._in_force = guard.agreed(self._begin, iteration, self._in_force, SCHEDULE)
        return self._in_force[SCHEDULE]

    def _begin(self, iteration: int) -> Bundle:
        """Return the agreed bundle; measure links with other replicas once all ranks have them."""
        bundle = self.controller.begin(iteration)
        cross, probes = self.wiring.cross, self.wiring.probes
        if cross is None or bundle is self._linked or not isinstance(bundle, Bundle):
            return bundle
        self._linked = bundle
        for worker in cross.keep(bundle[LINKS]):
            if probes is not None:
                self._context.guard.later(probes.add, worker)
        return bundle
