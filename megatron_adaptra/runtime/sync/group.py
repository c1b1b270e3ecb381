"""One rank's side of counts of microbatches that are found and chosen while training."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_adaptra import waits
from megatron_adaptra.ir.sync import SyncPlan
from megatron_adaptra.runtime.agreed_value import agreed_value
from megatron_adaptra.runtime.agreement import Ballot, DecisionStore
from megatron_adaptra.runtime.bundle import Bundle
from megatron_adaptra.runtime.channel import Channel
from megatron_adaptra.runtime.controller import Controller, Member
from megatron_adaptra.runtime.guard import Guard
from megatron_adaptra.runtime.leader import Leader
from megatron_adaptra.runtime.offer import Offers
from megatron_adaptra.runtime.record import RunRecord
from megatron_adaptra.runtime.store import KeyValueStore
from megatron_adaptra.runtime.sync.connections import SyncConnections
from megatron_adaptra.runtime.sync.decisions import SyncLog
from megatron_adaptra.runtime.sync.loop import SyncLoop
from megatron_adaptra.runtime.sync.value import SYNC, JobSync
from megatron_adaptra.runtime.voted_choice import RECENT
from megatron_adaptra.runtime.yielding import Yielding
from megatron_adaptra.telemetry.core_wait import CoreWait
from megatron_adaptra.telemetry.host_report import HostReport
from megatron_adaptra.telemetry.replica_row import ReplicaRow


class AdaptiveSync:
    """Measures each iteration's replicas, and knows what all of them run in it.

    What an iteration runs is asked for with `begin`, as soon as the one before has run its last
    microbatch; it `starts` when all ranks have come to it. `ended` gets, on all ranks and in a
    later iteration, the seconds of replicas' microbatches, until they wait for each other. What
    fails in measuring and choosing ends that alone: what is in force stays, on all ranks.

    Args:
        connections: between all ranks of the job.
        me: this rank's number there.
        replicas: by rank, its data-parallel replica.
        microbatches: of a replica in stock.
        first: the first iteration; messages of other runs are ignored.
        stages: of each replica's pipeline.
        min_gain: share of an iteration that counts have to save.
        timeout: seconds that a decision is waited for.
        log: file of decisions; None for none.
        record: file of what was measured and decided; None for none.
        offers: see SyncLoop; those of the first rank.
    """

    def __init__(
        self,
        connections: SyncConnections,
        me: int,
        replicas: Sequence[int],
        microbatches: int,
        first: int = 0,
        stages: int = 1,
        min_gain: float = 0.15,
        timeout: float = 600.0,
        log: Path | None = None,
        record: Path | None = None,
        offers: Offers | None = None,
    ) -> None:
        self._connections, self._me, self._replicas = connections, me, tuple(replicas)
        self._guard = Guard(f"shares of microbatches at rank {me}")
        self._full = SyncPlan.full_of(max(replicas) + 1, microbatches)
        self._value = JobSync(self._full)
        self._plan, self._void = self._full, self._value
        # The last iteration, when it began, and how long its thread had waited for a core by then.
        self._began: tuple[int, float, float | None] | None = None
        self._took: dict[int, float] = {}  # by iteration, its seconds
        self._queued: dict[int, float] = {}  # and how long this thread has waited for a core in it
        self._core_wait, self._yielding = CoreWait(), Yielding()
        self._controller = self._controls(first, stages, min_gain, timeout, log, record, offers)

    def _controls(
        self,
        first: int,
        stages: int,
        min_gain: float,
        timeout: float,
        log: Path | None,
        record: Path | None,
        offers: Offers | None,
    ) -> Controller:
        control, ranks = self._connections.control, len(self._replicas)
        ballot = Ballot(Bundle({SYNC: self._value}))
        store = DecisionStore(KeyValueStore("adaptra/sync/"))
        if self._me:
            return Member(ballot, {0: Channel(control, 0)}, store, timeout, first=first)
        channels = {peer: Channel(control, peer) for peer in range(1, ranks)}
        written = SyncLog(log, RunRecord(record))
        loop = SyncLoop(self._full.replicas, min_gain, written, stages, offers=offers)
        return Leader(ballot, channels, store, loop, first=first)

    # On the training thread.

    def begin(self, iteration: int, microbatches: int | None = None) -> SyncPlan:
        """The job's `iteration` begins: what all replicas run in it.

        `microbatches`: of a replica in stock, where their number may have changed: then all run as
        many, until counts are chosen anew.

        Raises:
            Disagreement: no decision came on what this rank has agreed to.
        """
        if microbatches is not None and microbatches != self._full.microbatches:
            self._full = SyncPlan.full_of(self._full.replicas, microbatches)
        value = agreed_value(self._guard, self._controller, iteration, SYNC, self._value)
        self._value = value
        if value.plan.microbatches != self._full.microbatches:
            self._void = value  # for good: all ranks know it, without a vote
        self._plan = self._full if value is self._void else value.plan
        if (loop := self.loop) is not None:
            self._guard.call(loop.runs, self._plan)
        return self._plan

    def starts(self, iteration: int) -> None:
        """All ranks start `iteration` now, within the way of a message.

        At the end of the one before each rank has a moment of its own: the time between two of
        those is no iteration's where a replica is late.
        """
        self._guard.call(self._take_moment, iteration)

    def _take_moment(self, iteration: int) -> None:
        """An iteration that begins twice began the first time."""
        now, waited, before = time.monotonic(), self._core_wait(), self._began
        if before is not None and before[0] == iteration:
            return
        if before is not None and before[0] == iteration - 1:
            self._took[iteration - 1] = now - before[1]
            self._took.pop(iteration - RECENT, None)
            if waited is not None and before[2] is not None:
                self._queued[iteration - 1] = waited - before[2]
            self._queued.pop(iteration - RECENT, None)
        self._began = iteration, now, waited

    @property
    def plan(self) -> SyncPlan:
        """What runs, from one `begin` to the next one."""
        return self._plan

    def ended(self, iteration: int, counts: tuple[int, ...], seconds: tuple[float, ...]) -> None:
        """Replicas have run so many microbatches in an `iteration`, their `counts`.

        `seconds`: by replica, since the first of them began, before it waits for others. All ranks
        know them: none is sent. It comes in the next iteration, or later.
        """
        self._guard.call(self._take_row, iteration, counts, seconds)

    def _take_row(
        self, iteration: int, counts: tuple[int, ...], seconds: tuple[float, ...]
    ) -> None:
        row = ReplicaRow(iteration, counts, seconds, self._took.get(iteration))
        if (loop := self.loop) is not None:
            loop.report(row)
        self._guard.later(self._look_at_host, row)

    @property
    def loop(self) -> SyncLoop | None:
        """What chooses, at the job's first rank; None at others."""
        loop = self._controller.loop if isinstance(self._controller, Leader) else None
        return loop if isinstance(loop, SyncLoop) else None

    # On the guard's thread.

    def _look_at_host(self, row: ReplicaRow) -> None:
        """Where this rank waits for a core, its helpers yield; if late, it reports the host."""
        queued, replica = self._queued.get(row.iteration), self._replicas[self._me]
        if row.took is not None and queued is not None:
            self._yielding.ended(queued, row.took)
        use = self._yielding.use
        if use is not None and row.late(replica):
            self._controller.hand_in(HostReport(self._me, replica, row.iteration, use))

    def close(self) -> None:
        """End measuring and voting, and the connections."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._connections.close)
            stack.callback(self._guard.close, waits.END)
            stack.callback(self._guard.attempt, waits.END, self._controller.close)
