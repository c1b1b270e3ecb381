"""Counts of microbatches voted on while training, by real processes: means, switches, faults."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE
from runtime.planted_sites import FAULTS, by_site, nonsense, raising, with_fault
from transport.ranks import RankFixture, run, until

from megatron_adaptra.ir.sync import SyncPlan
from megatron_adaptra.runtime.bundle import Bundle
from megatron_adaptra.runtime.controller import Controller
from megatron_adaptra.runtime.leader import Leader
from megatron_adaptra.runtime.sync import group
from megatron_adaptra.runtime.sync import loop as loop_module
from megatron_adaptra.runtime.sync.connections import SyncConnections
from megatron_adaptra.runtime.sync.group import AdaptiveSync
from megatron_adaptra.runtime.sync.loop import SyncLoop
from megatron_adaptra.runtime.sync.value import SYNC, JobSync
from megatron_adaptra.telemetry.host_report import HostReport
from megatron_adaptra.telemetry.host_use import HostUse
from megatron_adaptra.telemetry.replica_row import ReplicaRow

RANKS, MICROBATCHES, ITERATIONS = 3, 4, 12
FULL, SHARED = (4, 4, 4), (5, 5, 2)
NEVER = 1e9  # a gain that nothing has
FIRST = 100


def open_sync(transport: str, replicas: tuple[int, ...] = (0, 1, 2), **given: Any) -> AdaptiveSync:
    world = dist.group.WORLD
    assert world is not None
    connections = SyncConnections.between(world, PATIENCE, transport)
    return AdaptiveSync(
        connections, dist.get_rank(), replicas, MICROBATCHES, FIRST, timeout=PATIENCE,
        **{"min_gain": NEVER, **given},
    )  # fmt: skip


def gradient(home: int, microbatch: int, iteration: int) -> float:
    return 1.0 + home + 10.0 * microbatch + 100.0 * iteration


def step(sync: AdaptiveSync, iteration: int, microbatches: int = MICROBATCHES) -> tuple[int, ...]:
    """One iteration of a model with one weight; the counts that ran."""
    plan = sync.begin(iteration, microbatches)
    sync.starts(iteration)
    replica = sync._replicas[dist.get_rank()]
    share = plan.share(replica)
    own = sum(gradient(home, j, iteration) for home, j in share) / len(share)
    mean = torch.tensor(own * float(plan.weight(replica)), dtype=torch.float64)
    sync.ended(iteration, plan.counts, tuple(0.1 * count for count in plan.counts))
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    pairs = [(home, j) for home in range(plan.replicas) for j in range(microbatches)]
    exact = sum(gradient(home, j, iteration) for home, j in pairs) / len(pairs)
    assert abs(float(mean) / exact - 1) < 1e-12
    return plan.counts


def train(
    me: RankFixture, transport: str, fail: Callable[[int, AdaptiveSync], None] | None = None
) -> list[tuple[int, ...]]:
    """What ran in each iteration, with votes on other counts, and back."""
    sync = open_sync(transport)
    controller = sync._controller
    if fail is not None:
        fail(me.rank, sync)
    ran = []
    for number in range(ITERATIONS):
        if number in (3, 8) and isinstance(controller, Leader):
            counts = SHARED if number == 3 else FULL
            bundle = Bundle({SYNC: JobSync(SyncPlan(MICROBATCHES, counts))})
            proposal = controller.propose(FIRST + number, bundle)
            assert proposal is not None or fail is not None
            if proposal is not None:
                until(lambda p=proposal: p.committed is not None, "all ranks agree")
                assert proposal.committed
            controller._open = None  # as the loop does when it is over
        me.meet()
        ran.append(step(sync, FIRST + number))
    if sync.loop is not None and fail is None:
        until(lambda: sync.loop.seen >= FIRST + ITERATIONS - 2, "all iterations")
    me.meet()
    sync.close()
    return ran


def switches(ran: list[tuple[int, ...]]) -> tuple[int, int]:
    """The iterations in which counts were shared out, from first to last, and in one piece."""
    first, last = ran.index(SHARED), len(ran) - ran[::-1].index(SHARED)
    assert ran == [FULL] * first + [SHARED] * (last - first) + [FULL] * (len(ran) - last)
    return first, last


@pytest.mark.parametrize("transport", ["gloo", "engine"])
def test_all_replicas_switch_in_one_iteration_and_means_are_right(transport: str) -> None:
    rows = run("gloo", train, transport, ranks=RANKS)
    assert all(row == rows[0] for row in rows)
    first, last = switches(rows[0])
    assert 3 < first <= 5 < 8 < last <= 10


SITES = {
    "moments": (AdaptiveSync, "_take_moment"), "taken": (AdaptiveSync, "_take_row"),
    "hosts": (AdaptiveSync, "_look_at_host"), "runs": (SyncLoop, "runs"),
    "rows": (SyncLoop, "_on_row"), "estimates": (SyncLoop, "_take_rest"),
    "begin": (Controller, "begin"),
}  # fmt: skip


def planted(me: RankFixture, where: int) -> dict[str, list[tuple[int, ...]]]:
    """By site and fault, what ran although the site of rank `where` has it."""
    return by_site(SITES, partial(faulty, me, where))


def faulty(
    me: RankFixture, where: int, site: str, what: Callable[..., Any]
) -> list[tuple[int, ...]]:
    return with_fault(SITES, where, site, what, partial(train, me, "engine"))


@pytest.mark.parametrize("where", [0, 1])
def test_what_fails_in_measuring_leaves_the_training_as_it_was(where: int) -> None:
    """Right means on all ranks, which run the same."""
    rows = run("gloo", planted, where, ranks=RANKS)
    assert all(row == rows[0] for row in rows)
    for site in SITES:
        for what in FAULTS:
            ran = rows[0][f"{site} {what.__name__}"]
            if site == "begin":  # on all ranks, as nobody votes any more
                assert ran == [FULL] * ITERATIONS
            else:
                switches(ran)  # the vote goes on


def chosen(me: RankFixture, where: str, what: Callable[..., Any]) -> list[tuple[int, ...]]:
    """What ran, with a slow replica, where choosing counts at the leader fails."""
    with pytest.MonkeyPatch.context() as patch:
        if where:
            patch.setattr(loop_module, where, what)
        sync = open_sync("engine", min_gain=0.1)
        ran = []
        for number in range(2 * ITERATIONS):
            plan = sync.begin(FIRST + number)
            sync.starts(FIRST + number)
            ran.append(plan.counts)
            each = [0.1 * count * (1 + (rank == 2)) for rank, count in enumerate(plan.counts)]
            sync._took[FIRST + number] = max(each) + 0.05  # follows from counts, too
            sync.ended(FIRST + number, plan.counts, tuple(each))
            if sync.loop is not None:
                until(lambda n=number: sync.loop.seen >= FIRST + n or where != "", "a row")
                sync.loop.drain(PATIENCE)
                proposal = sync._controller._open
                if proposal is not None:
                    until(lambda p=proposal: p.committed is not None, "all ranks agree")
            me.meet()
        sync.close()
    return ran


def test_rows_with_a_slow_replica_change_counts_on_all_ranks() -> None:
    rows = run("gloo", chosen, "", raising, ranks=RANKS)
    assert all(row == rows[0] for row in rows)
    assert rows[0][0] == FULL
    assert rows[0][-1] == SHARED


@pytest.mark.parametrize("where", ["share_by_speed", "ReplicaSpeeds", "cheaper_remedies"])
@pytest.mark.parametrize("what", [raising, nonsense])
def test_where_choosing_fails_all_go_on_with_equal_counts(
    where: str, what: Callable[..., Any]
) -> None:
    rows = run("gloo", chosen, where, what, ranks=RANKS)
    assert all(row == [FULL] * (2 * ITERATIONS) for row in rows)


def ramps(me: RankFixture) -> list[tuple[int, ...]]:
    """A number of microbatches that changes, and comes back, while other counts are in force."""
    sync = open_sync("engine")
    ran = []
    for number, microbatches in enumerate([4, 4, 4, 4, 6, 6, 4, 4]):
        if number == 1 and isinstance(sync._controller, Leader):
            bundle = Bundle({SYNC: JobSync(SyncPlan(MICROBATCHES, SHARED))})
            proposal = sync._controller.propose(FIRST + number, bundle)
            assert proposal is not None
            until(lambda p=proposal: p.committed is not None, "all ranks agree")
        me.meet()
        ran.append(step(sync, FIRST + number, microbatches))
        assert sync.begin(FIRST + number, microbatches).counts == ran[-1], "once more"
        assert sync.plan.counts == ran[-1]
    me.meet()
    sync.close()
    return ran


def test_another_number_of_microbatches_begins_with_equal_counts_for_good() -> None:
    for ran in run("gloo", ramps, ranks=RANKS):
        assert ran == [FULL] * 2 + [SHARED] * 2 + [(6, 6, 6)] * 2 + [FULL] * 2


USE = HostUse(0.4, 0.6, 0.0, 0.0, 1.3, 2)


def taken(me: RankFixture) -> Any:
    """What iterations take that do not all follow one another, and reports of hosts.

    The thread waits for a core for a quarter of them. The first replica is late in one.
    """
    with pytest.MonkeyPatch.context() as patch:
        sync = open_sync("gloo")
        rows, hosts = list[Any](), list[Any]()
        if sync.loop is not None:
            patch.setattr(sync.loop, "report", rows.append)
        patch.setattr(sync._controller, "hand_in", hosts.append)
        patch.setattr(sync._guard, "later", lambda function, *args: function(*args))
        moments, waits, looked = iter(range(100)), iter(range(100)), list[Any]()
        patch.setattr(group.time, "monotonic", lambda: float(next(moments)))
        patch.setattr(sync, "_core_wait", lambda: next(waits) / 4)
        patch.setattr(sync._yielding, "ended", lambda *row: looked.append(row))
        sync._yielding.use = USE
        for iteration in (FIRST, FIRST + 1, FIRST + 1, FIRST + 2, FIRST + 4):
            sync._take_moment(iteration)
            late = 2.0 if iteration == FIRST + 2 else 1.0
            sync.ended(iteration - 1, FULL, (late, 1.0, 1.0))
    me.meet()
    sync.close()
    return rows, looked, hosts


def test_an_iteration_is_measured_from_start_to_start_and_a_late_host_reports_itself() -> None:
    for rank, (rows, looked, hosts) in enumerate(run("gloo", taken, ranks=RANKS)):
        assert looked == [(0.25, 1.0), (0.25, 1.0), (0.5, 2.0)]
        same, late = (1.0, 1.0, 1.0), (2.0, 1.0, 1.0)
        wanted = [
            ReplicaRow(FIRST - 1, FULL, same, None),
            ReplicaRow(FIRST, FULL, same, 1.0),
            ReplicaRow(FIRST, FULL, same, 1.0),
            ReplicaRow(FIRST + 1, FULL, late, 2.0),  # from when it began for the first time
            ReplicaRow(FIRST + 3, FULL, same, None),  # an iteration is missing
        ]
        assert rows == ([] if rank else wanted), "at the leader, without a message"
        assert hosts == ([] if rank else [HostReport(0, 0, FIRST + 1, USE)])
