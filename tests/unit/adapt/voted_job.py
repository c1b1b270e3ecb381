"""All ranks of a job that vote on counts of microbatches, fed with iterations that never ran."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from patience import PATIENCE

from megatron_adaptra.adapt.loop import Loop, Offers
from megatron_adaptra.adapt.shares.remedy import ShareRemedy
from megatron_adaptra.execute.shares.adaptive import AdaptiveShares
from megatron_adaptra.ir.sync import SyncPlan
from megatron_adaptra.measure.host_use import HostUse
from megatron_adaptra.measure.replica_speed import ReplicaRow

MICROBATCH = 0.1  # seconds
STEP = 0.05  # seconds after the last replica has run


class VotedJob:
    """Every rank is a replica. What goes round with a vote goes round by hand.

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
        self.replicas, self.microbatches, self.first = replicas, microbatches, first
        self.ran, self.took = list[tuple[int, ...]](), list[float]()
        self.ranks = [
            AdaptiveShares(
                rank, replicas, microbatches, first, min_gain=min_gain, log=path,
                record=path.with_name("sync.jsonl"), offers=offers,
            )
            for rank in range(replicas)
        ]  # fmt: skip
        self._voted: tuple[int, ...] | None = None  # at the end of the last iteration
        self._next = self._begin(first)

    @property
    def loop(self) -> Loop[ShareRemedy]:
        found = self.ranks[0].loop
        assert found is not None
        return found

    def _begin(self, iteration: int) -> SyncPlan:
        """What all ranks run in an `iteration`."""
        voted, self._voted = self._voted, None
        plans = [one.begin(iteration, voted, self.microbatches) for one in self.ranks]
        assert plans == [plans[0]] * self.replicas, "all ranks run the same"
        return plans[0]

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
        start = self.first + len(self.ran)
        if self._next.microbatches != self.microbatches:  # it begins anew
            self._next = self._begin(start)
        for iteration in range(start, start + iterations):
            plan = self._next
            self.ran.append(plan.counts)
            each = [MICROBATCH * (slow or {}).get(replica, 1.0) for replica in range(self.replicas)]
            seconds = tuple(count * one for count, one in zip(plan.counts, each, strict=True))
            moved = sum(max(0, count - plan.microbatches) for count in plan.counts)
            self.took.append(max(seconds) + step + away * moved)
            self._next = self._begin(iteration + 1)
            given = [one.gives(iteration)[1] for one in self.ranks]
            assert given[1:] == [None] * (self.replicas - 1), "one rank proposes"
            self._voted = given[0]
            hosts = tuple((uses or {}).get(replica) for replica in range(self.replicas))
            row = ReplicaRow(iteration, plan.counts, seconds, hosts)
            for one in self.ranks:
                one._took[iteration] = self.took[-1]
                if not unknown:
                    one.ended(row)
            self.loop.drain(PATIENCE)
        return self.ran[-iterations:]

    def close(self) -> None:
        for one in self.ranks:
            one.close()
