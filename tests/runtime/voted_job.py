"""All ranks of a job that vote on counts of microbatches, fed with iterations that never ran."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from patience import PATIENCE
from runtime.voted_ranks import VotedRanks
from transport.ranks import until

from megatron_adaptra.ir.sync import SyncPlan
from megatron_adaptra.runtime.offer import Offers
from megatron_adaptra.runtime.record import RunRecord
from megatron_adaptra.runtime.sync.decisions import SyncLog
from megatron_adaptra.runtime.sync.loop import SyncLoop
from megatron_adaptra.runtime.sync.value import SYNC, JobSync
from megatron_adaptra.telemetry.host_report import HostReport
from megatron_adaptra.telemetry.host_use import HostUse
from megatron_adaptra.telemetry.replica_row import ReplicaRow

MICROBATCH = 0.1  # seconds
STEP = 0.05  # seconds after the last replica has run


class VotedJob(VotedRanks):
    """Every rank is a replica.

    `ran`: by iteration the counts that all of them ran. `took`: seconds of an iteration.
    """

    def __init__(
        self,
        replicas: int,
        path: Path,
        microbatches: int = 8,
        min_gain: float = 0.15,
        offers: Offers | None = None,
        first: int = 0,
    ) -> None:
        self.replicas, self.microbatches = replicas, microbatches
        self.ran, self.took = list[tuple[int, ...]](), list[float]()
        log = SyncLog(path, RunRecord(path.with_name("sync.jsonl")))
        self.sync = SyncLoop(replicas, min_gain, log, offers=offers)
        values = {SYNC: JobSync(SyncPlan.full_of(replicas, microbatches))}
        super().__init__(replicas, values, lambda: self.sync, first)

    def train(
        self,
        iterations: int,
        slow: Mapping[int, float] | None = None,
        unknown: bool = False,
        away: float = 0.0,
        step: float = STEP,
        uses: Mapping[int, HostUse] | None = None,
    ) -> list[tuple[int, ...]]:
        """What ran; `slow` replicas take so many times as long.

        `unknown`: a rank has not measured what its replica takes. `away`: seconds that each
        microbatch of another home takes besides, at a slow moment. `step`: seconds after the last
        replica has run. `uses`: of hosts, by replica.
        """
        for iteration in range(len(self.ran), len(self.ran) + iterations):
            plan = self._begin(iteration)[SYNC].plan
            if plan.microbatches != self.microbatches:
                plan = SyncPlan.full_of(self.replicas, self.microbatches)
            self.sync.runs(plan)
            self.ran.append(plan.counts)
            each = [MICROBATCH * (slow or {}).get(replica, 1.0) for replica in range(self.replicas)]
            seconds = tuple(count * one for count, one in zip(plan.counts, each, strict=True))
            moved = sum(max(0, count - plan.microbatches) for count in plan.counts)
            self.took.append(max(seconds) + step + away * moved)
            for rank, use in (uses or {}).items():
                self.controllers[rank].hand_in(HostReport(rank, rank, iteration, use))
            until(partial(self._hosts_are_known, iteration, set(uses or {})), "reports of hosts")
            if not unknown:
                self.sync.report(ReplicaRow(iteration, plan.counts, seconds, self.took[-1]))
            last = self.sync.seen if unknown else iteration
            until(partial(self._dealt_with, last, ()), f"iteration {iteration}")
        return self.ran[-iterations:]

    def _hosts_are_known(self, iteration: int, ranks: set[int]) -> bool:
        """Whether the leader has dealt with these ranks' reports of an `iteration`."""
        self.sync.drain(PATIENCE)
        return ranks == {r for r, host in self.sync._hosts.items() if host.iteration == iteration}
