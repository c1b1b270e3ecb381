"""Counts of microbatches voted on while training, by real processes: means, switches, faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE
from transport.ranks import RankFixture, run

from megatron_adaptra.adapt.counts_vote import SYNC
from megatron_adaptra.agree.bundle import Bundle
from megatron_adaptra.agree.share_vote import READY, Given, ShareVote
from megatron_adaptra.execute.shares import adaptive as group
from megatron_adaptra.execute.shares.adaptive import AdaptiveShares
from megatron_adaptra.ir.sync import SyncPlan
from megatron_adaptra.measure.host_use import HostUse
from megatron_adaptra.measure.replica_speed import ReplicaRow

RANKS, MICROBATCHES, ITERATIONS = 3, 4, 12
FULL, SHARED = (4, 4, 4), (5, 5, 2)
NEVER = 1e9  # a gain that nothing has
FIRST = 100


class Job:
    """One rank's sync and vote, as shares of microbatches use them."""

    def __init__(self, **given: Any) -> None:
        self.rank = dist.get_rank()
        self.sync = AdaptiveShares(
            self.rank, RANKS, MICROBATCHES, FIRST, **{"min_gain": NEVER, **given}
        )
        self._vote = ShareVote(RANKS, PATIENCE)
        self._voted: tuple[int, ...] | None = None
        self._next = self.sync.begin(FIRST, None, MICROBATCHES)

    def run(
        self, iteration: int, seconds: Callable[[SyncPlan], Sequence[float]], microbatches: int = 4
    ) -> SyncPlan:
        """One iteration, in which replicas take so many `seconds`; what they have run."""
        plan = self._next
        self.sync.starts(iteration)
        voted, self._voted = self._voted, None
        self._next = self.sync.begin(iteration + 1, voted, microbatches)
        use, counts = self.sync.gives(iteration)
        given = Given(seconds(plan)[self.rank], use, counts)
        self._vote.start(READY, self._next.text(), self.rank, given)
        word, known, uses, self._voted = self._vote.result()
        assert word == READY, "all ranks are about to run the same"
        assert known is not None
        self.sync._took[iteration] = max(known) + 0.05  # follows from counts, too
        self.sync.ended(ReplicaRow(iteration, plan.counts, known, uses))
        return plan

    def close(self) -> None:
        self._vote.close()
        self.sync.close()


def gradient(home: int, microbatch: int, iteration: int) -> float:
    return 1.0 + home + 10.0 * microbatch + 100.0 * iteration


def step(job: Job, iteration: int, microbatches: int = MICROBATCHES) -> tuple[int, ...]:
    """One iteration of a model with one weight; the counts that ran."""
    plan = job.run(iteration, lambda plan: [0.1 * count for count in plan.counts], microbatches)
    share = plan.share(job.rank)
    own = sum(gradient(home, j, iteration) for home, j in share) / len(share)
    mean = torch.tensor(own * float(plan.weight(job.rank)), dtype=torch.float64)
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    pairs = [(home, j) for home in range(plan.replicas) for j in range(plan.microbatches)]
    exact = sum(gradient(home, j, iteration) for home, j in pairs) / len(pairs)
    assert abs(float(mean) / exact - 1) < 1e-12
    return plan.counts


def propose(job: Job, iteration: int, counts: tuple[int, ...], works: bool = True) -> None:
    """As what chooses does, at the first rank, if that `works`; nothing at others."""
    if job.sync.loop is not None:
        bundle = Bundle({SYNC: SyncPlan(MICROBATCHES, counts)})
        proposal = job.sync._vote.propose(iteration, bundle)
        assert proposal is not None or not works
        assert job.sync._vote.propose(iteration, bundle) is None, "one at a time"


def train(
    me: RankFixture, fail: Callable[[int, AdaptiveShares], None] | None = None
) -> list[tuple[int, ...]]:
    """What ran in each iteration, with votes on other counts, and back."""
    job = Job()
    if fail is not None:
        fail(me.rank, job.sync)
    ran = []
    for number in range(ITERATIONS):
        if number in (3, 8):
            propose(job, FIRST + number, SHARED if number == 3 else FULL, fail is None)
        ran.append(step(job, FIRST + number))
        if (loop := job.sync.loop) is not None:
            loop.drain(PATIENCE)
    if job.sync.loop is not None and fail is None:
        assert job.sync.loop.seen == FIRST + ITERATIONS - 1
    me.meet()
    job.close()
    return ran


def switches(ran: list[tuple[int, ...]]) -> tuple[int, int]:
    """The iterations in which counts were shared out, from first to last, and in one piece."""
    first, last = ran.index(SHARED), len(ran) - ran[::-1].index(SHARED)
    assert ran == [FULL] * first + [SHARED] * (last - first) + [FULL] * (len(ran) - last)
    return first, last


def test_all_replicas_switch_in_one_iteration_and_means_are_right() -> None:
    """Two after the one in which counts are proposed."""
    rows = run("gloo", train, ranks=RANKS)
    assert all(row == rows[0] for row in rows)
    assert switches(rows[0]) == (5, 10)


def ramps(me: RankFixture) -> list[tuple[int, ...]]:
    """A number of microbatches that changes, and comes back, while other counts are in force."""
    job = Job()
    ran = []
    each = [4, 4, 4, 4, 6, 6, 4, 4, 4]
    for number, microbatches in enumerate(each[1:]):  # those of the next iteration
        if number == 0:
            propose(job, FIRST, SHARED)
        ran.append(step(job, FIRST + number, microbatches))
        again = job.sync.begin(FIRST + number + 1, None, microbatches)
        assert again == job._next == job.sync.plan, "once more"
    me.meet()
    job.close()
    return ran


def test_another_number_of_microbatches_begins_with_equal_counts_for_good() -> None:
    for ran in run("gloo", ramps, ranks=RANKS):
        assert ran == [FULL] * 2 + [SHARED] * 2 + [(6, 6, 6)] * 2 + [FULL] * 2


def late(me: RankFixture) -> tuple[list[tuple[int, ...]], list[bool]]:
    """Counts that are proposed when the number of microbatches has just become another one."""
    job = Job()
    ran = [step(job, FIRST, 6)]
    propose(job, FIRST + 1, SHARED)
    ran += [step(job, FIRST + 1 + number, 6) for number in range(4)]
    closed = []
    if (loop := job.sync.loop) is not None:
        loop.drain(PATIENCE)
        closed.append(job.sync._vote.can_propose(FIRST))
    me.meet()
    job.close()
    return ran, closed


def test_counts_for_another_number_of_microbatches_never_come_into_force() -> None:
    for rank, (ran, closed) in enumerate(run("gloo", late, ranks=RANKS)):
        assert ran == [FULL] + [(6, 6, 6)] * 4
        assert closed == ([] if rank else [True])


USE = HostUse(0.4, 0.0, 0.0, 0.0, 1.3, 2)
ITERATED = [FIRST + number for number in (0, 1, 1, 2, 4, 5, 6)]


def taken(me: RankFixture) -> Any:
    """What iterations take that do not all follow one another.

    In the first ones the thread waits for a core for a quarter of the time.
    """
    with pytest.MonkeyPatch.context() as patch:
        sync = AdaptiveShares(me.rank, RANKS, MICROBATCHES, FIRST)
        rows = list[ReplicaRow]()
        if sync.loop is not None:
            patch.setattr(sync.loop, "report", rows.append)
        patch.setattr(sync._guard, "later", lambda function, *args: function(*args))
        moments, looked = iter(range(100)), list[Any]()
        waits = iter([0, 1, 1, 2, 2, 2.1, 2.2])
        patch.setattr(group.time, "monotonic", lambda: float(next(moments)))
        patch.setattr(sync, "_core_wait", lambda: next(waits) / 4)
        patch.setattr(sync._yielding, "ended", lambda *row: looked.append(row))
        for iteration in ITERATED:
            sync.starts(iteration)
            sync.ended(ReplicaRow(iteration - 1, FULL, (1.0, 1.0, 1.0), (None, USE, None)))
        sync._yielding.use = USE
        assert sync.gives(ITERATED[-1]) == (USE, None)
    me.meet()
    sync.close()
    return rows, looked


def test_an_iteration_is_measured_from_start_to_start() -> None:
    for rank, (rows, looked) in enumerate(run("gloo", taken, ranks=RANKS)):
        # The last one that waits no longer is looked at, too; those after it are not.
        assert looked == [(0.25, 1.0), (0.25, 1.0), (0.25, 2.0), (pytest.approx(0.025), 1.0)]
        known = (1.0, 1.0, 1.0), (None, USE, None)
        wanted = [
            ReplicaRow(FIRST - 1, FULL, *known, None),
            ReplicaRow(FIRST, FULL, *known, 1.0),
            ReplicaRow(FIRST, FULL, *known, 1.0),
            ReplicaRow(FIRST + 1, FULL, *known, 2.0),  # from when it began for the first time
            ReplicaRow(FIRST + 3, FULL, *known, None),  # an iteration is missing
            ReplicaRow(FIRST + 4, FULL, *known, 1.0),
            ReplicaRow(FIRST + 5, FULL, *known, 1.0),
        ]
        assert rows == ([] if rank else wanted), "at the first rank, without a message"
