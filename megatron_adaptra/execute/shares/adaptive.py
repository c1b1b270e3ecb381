"""One rank's side of counts of microbatches that are found and chosen while training."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path

from megatron_adaptra.adapt.counts_vote import SYNC, CountsVote
from megatron_adaptra.adapt.log import DecisionLog
from megatron_adaptra.adapt.loop import RECENT_ITERATIONS, Loop, Offers
from megatron_adaptra.adapt.record import RunRecord
from megatron_adaptra.adapt.shares.remedy import ShareDecision, ShareRemedy
from megatron_adaptra.adapt.switch import Acts, always
from megatron_adaptra.agree.bundle import Bundle
from megatron_adaptra.agree.guard import Guard
from megatron_adaptra.base import waits
from megatron_adaptra.base.processes import descendants
from megatron_adaptra.diagnose.replicas import ReplicaDiagnosis
from megatron_adaptra.ir.sync import SyncPlan
from megatron_adaptra.measure.core_wait import CoreWait
from megatron_adaptra.measure.host_use import HostMeter, HostUse
from megatron_adaptra.measure.replica_speed import ReplicaRow

WAITS = 0.1  # share of an iteration: a rank whose thread waits so long for a core is late
HOLDS = 3  # iterations in a row that show it, before the host is looked at ...
SPAN = 4  # ... for so many, ...
PAUSE = 16  # ... and then no more for so many
NICE = 10  # more than the training: about a ninth of its time on a core that both want


class AdaptiveShares:
    """An adaptive sync measures each iteration's replicas, and keeps what all of them run.

    What an iteration runs is asked for with `begin`, as soon as the one before has run its last
    microbatch; it `starts` when all ranks have come to it. `gives` returns what a rank adds to the
    vote of all ranks that a ShareVote takes in between. `ended` gets, on all ranks and in a later
    iteration, what replicas have taken until they waited for each other. What fails in measuring
    and choosing ends that alone: what is in force stays, on all ranks.

    Args:
        me: this rank's number; rank 0 chooses.
        replicas: how many there are.
        microbatches: of a replica in stock.
        first: the first iteration.
        stages: of each replica's pipeline.
        min_gain: share of an iteration that counts have to save.
        log: file of decisions; None for none.
        record: file of what was measured and decided; None for none.
        offers: see ShareRemedy; those of the first rank.
        acts: see Loop.
        diagnosis: see ShareRemedy; that of the first rank.

    `plan`: runs from one `begin` to the next one. `loop`: the loop that chooses counts, at rank 0;
    None at others.
    """

    def __init__(
        self,
        me: int,
        replicas: int,
        microbatches: int,
        first: int = 0,
        stages: int = 1,
        min_gain: float = 0.15,
        log: Path | None = None,
        record: Path | None = None,
        offers: Offers | None = None,
        acts: Acts = always,
        diagnosis: ReplicaDiagnosis | None = None,
    ) -> None:
        self._guard = Guard(f"shares of microbatches at rank {me}")
        self._full = self.plan = SyncPlan.full_of(replicas, microbatches)
        # The last iteration, when it began, and how long its thread had waited for a core by then.
        self._began: tuple[int, float, float | None] | None = None
        self._took: dict[int, float] = {}  # by iteration, its seconds
        self._queued: dict[int, float] = {}  # and how long this thread has waited for a core in it
        self._core_wait, self._yielding = CoreWait(), Yielding()
        self._waits = False  # for a core, in the last iteration that is known
        self.loop: Loop[ShareRemedy] | None = None
        self._vote = CountsVote(first, self._bundle())
        if me == 0:
            written = DecisionLog(ShareDecision, log, RunRecord(record))
            remedy = ShareRemedy(replicas, min_gain, written, stages, offers, diagnosis)
            self.loop = Loop(remedy, acts=acts)
            self.loop.start(self._vote)

    def _bundle(self) -> Bundle:
        return Bundle({SYNC: self.plan})

    # On the training thread.

    def begin(self, iteration: int, voted: tuple[int, ...] | None, microbatches: int) -> SyncPlan:
        """Begin the job's `iteration`. Returns what all replicas run in it, on all ranks alike.

        Args:
            iteration: it may begin twice.
            voted: the counts that all ranks have learned of by their last vote, if there are any.
            microbatches: of a replica in stock; where their number has changed, all run as many,
                until counts are chosen anew.

        Raises:
            BadInput: the counts that were voted on are not valid.
        """
        if microbatches != self._full.microbatches:
            self._full = self.plan = SyncPlan.full_of(self._full.replicas, microbatches)
        if voted is not None and sum(voted) == sum(self._full.counts):
            self.plan = SyncPlan(self._full.microbatches, voted)
        if self.loop is not None:
            self._guard.call(self._begins, iteration, self.loop)
        return self.plan

    def _begins(self, iteration: int, loop: Loop[ShareRemedy]) -> None:
        if (closed := self._vote.begin(iteration, self._bundle())) is not None:
            loop.closed(closed)
        loop.remedy.runs(self.plan)

    def gives(self, iteration: int) -> tuple[HostUse | None, tuple[int, ...] | None]:
        """Return what this rank adds to the vote at the end of `iteration`.

        The use of its host, None unless it waits for a core; and the counts that rank 0 proposes,
        None where there are none.
        """
        return self._yielding.use, self._guard.call(self._vote.take, iteration)

    def starts(self, iteration: int) -> None:
        """Record that all ranks start `iteration` now, within the delay of a message.

        Each rank ends the one before at a moment of its own: where a replica is late, the time
        between two of those is not that of an iteration.
        """
        self._guard.call(self._take_moment, iteration)

    def _take_moment(self, iteration: int) -> None:
        """Record when `iteration` began; of one that begins twice, the first moment counts."""
        now, waited, before = time.monotonic(), self._core_wait(), self._began
        if before is not None and before[0] == iteration:
            return
        if before is not None and before[0] == iteration - 1:
            self._took[iteration - 1] = now - before[1]
            self._took.pop(iteration - RECENT_ITERATIONS, None)
            if waited is not None and before[2] is not None:
                self._queued[iteration - 1] = waited - before[2]
            self._queued.pop(iteration - RECENT_ITERATIONS, None)
        self._began = iteration, now, waited

    def ended(self, row: ReplicaRow) -> None:
        """Take the `row` of an iteration that all replicas have run, as all ranks know by the vote.

        It comes in the next iteration, or later; the seconds of the iteration here are filled in.
        """
        self._guard.call(self._take_row, row)

    def _take_row(self, row: ReplicaRow) -> None:
        row = replace(row, took=self._took.get(row.iteration))
        if self.loop is not None:
            self.loop.report(row)
        queued = self._queued.get(row.iteration)
        if row.took is None or queued is None:
            return
        before, self._waits = self._waits, queued >= WAITS * row.took
        if before or self._waits:  # else nothing has changed, and a thread would wake up for it
            self._guard.later(self._yielding.ended, queued, row.took)

    def close(self) -> None:
        """End measuring and choosing."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._guard.close, waits.END)
            if self.loop is not None:
                stack.callback(self._guard.attempt, waits.END, self.loop.close)


class Yielding:
    """A yielder lowers the priority of a rank's child processes while its thread lacks a core.

    Data workers and writers of checkpoints compute beside the training, which then waits less.

    `use`: who computed on its host in the last span; None while it need not wait. A process
    without privileges cannot raise a priority again, so that a lower one stays.
    """

    def __init__(self) -> None:
        self.use: HostUse | None = None
        self._meter = HostMeter()
        self._seen = 0
        self._queued = self._seconds = 0.0  # in the span

    def ended(self, queued: float, seconds: float) -> None:
        """Record an iteration of `seconds`, `queued` of which its thread waited for a core."""
        if not seconds > 0 or queued < WAITS * seconds:
            self._seen, self.use = 0, None
            return
        self._seen += 1
        if self._seen < HOLDS:
            return
        if self._seen == HOLDS:
            self._queued = self._seconds = 0.0
            self._meter.begin()
            return
        self._queued += queued
        self._seconds += seconds
        if self._seen < HOLDS + SPAN:
            return
        self.use = self._meter.end(min(1.0, self._queued / self._seconds))
        self._seen = -PAUSE  # then looked at again: others may have been started
        if self.use is not None and self.use.hogs:
            lower_priority(descendants())


def lower_priority(pids: set[int]) -> None:
    """Lower the priority of all threads of `pids`, where they still run and have a higher one."""
    nice = os.getpriority(os.PRIO_PROCESS, 0) + NICE  # the kernel takes 19 for what is more
    for pid in pids:
        with contextlib.suppress(OSError):
            for thread in map(int, os.listdir(f"/proc/{pid}/task")):
                if os.getpriority(os.PRIO_PROCESS, thread) < nice:
                    os.setpriority(os.PRIO_PROCESS, thread, nice)
