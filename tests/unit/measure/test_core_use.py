"""What ops take on a core of their own, and whose conditions have shared cores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from measure.records import report

from megatron_adaptra.measure.core_use import CoreUse, queue_share
from megatron_adaptra.measure.estimate import Estimator
from megatron_adaptra.measure.replica_estimate import ReplicaEstimator
from megatron_adaptra.measure.report import StageReport

MS = 1e-3
STAGES, REPLICAS, COUNT = 2, 2, 4
CPU = {"F": 4 * MS, "B": 8 * MS}
WORKER = 3  # 1.1


def row(
    worker: int = 0,
    queued: float = 0.0,
    idle: float = 0.0,
    overhead: float = 1.0,
    slow: float = 1.0,
) -> StageReport:
    """Of a worker whose ops queue and wait for so many times as long as they compute.

    `overhead`: see StageReport. `slow`: so many times as long as others.
    """
    cpu = {kind: slow * seconds for kind, seconds in CPU.items()}

    def times(share: float) -> dict[str, float]:
        return {kind: share * seconds for kind, seconds in cpu.items()}

    return report(
        worker, wall=times(1 + queued + idle), cpu=cpu, queued=times(queued),
        idle=times(idle), overhead=overhead,
    )  # fmt: skip


def used(*reports: StageReport, normally: float = 0.5) -> CoreUse:
    use = CoreUse()
    for one in reports:
        use.update(one, normally)
    return use


@pytest.mark.parametrize(
    ("given", "seconds", "share", "longer"),
    [
        (row(), 4, 1.0, 0.0),
        (row(queued=0.5), 4, 1.0, 0.0),  # others have had its core, as everywhere
        (row(queued=3.5), 4, 1.0, 3.0),  # something else has, too
        (row(idle=3.0), 16, 0.25, 0.0),  # suspended
        (row(idle=3.0, queued=0.5), 16, 0.25, 0.0),
        (row(idle=3.0, queued=1.5), 16, 0.25, 0.25),
        (row(overhead=1.5), 6, 1.0, 0.0),  # other threads of the process, too
        (row(overhead=1.5, idle=3.0), 16, 0.375, 0.0),  # which run while the op waits
        (row(overhead=0.9), 4, 1.0, 0.0),
    ],
)
def test_one_worker(given: StageReport, seconds: float, share: float, longer: float) -> None:
    use = CoreUse()
    seen = use.update(given, 0.5)
    assert use.seconds().forward == pytest.approx(seconds * MS)
    assert use.seconds().backward == pytest.approx(2 * seconds * MS)
    assert use.share == pytest.approx(share)
    assert use.longer == pytest.approx(longer)
    assert seen.wall["F"] == pytest.approx(seconds * MS * (1 + longer))


def test_one_iteration_with_a_burst_of_others_changes_nothing() -> None:
    use = used(row(), row(), row(idle=50.0, queued=50.0), row(), row())
    assert (use.seconds().forward, use.share, use.longer) == (pytest.approx(4 * MS), 1.0, 0.0)


def test_one_op_that_queues_for_long_is_no_quota() -> None:
    """It is in the mean, not in the median."""
    burst = replace(row(), queued={"F": 90 * MS, "B": 0.0})
    assert used(burst).longer == 0.0


def test_nothing_is_known_of_who_ran_nothing_or_cannot_count() -> None:
    assert queue_share(report(0)) is None
    assert queue_share(replace(row(), queued={}, idle={})) is None
    assert queue_share(row(queued=0.5)) == pytest.approx(0.5)
    assert not CoreUse().known


def estimator(hosts: str = "aaaa", cores: float | None = 1.0) -> ReplicaEstimator:
    """`hosts`: a letter per worker. `cores`: of each pipeline."""
    each = [
        Estimator(COUNT, list(hosts[first:][:STAGES]), cores, 1 << 20, first=first)
        for first in range(0, STAGES * REPLICAS, STAGES)
    ]
    return ReplicaEstimator(each)


def fed(
    e: ReplicaEstimator, odd: StageReport, queued: float = 0.0, healthy: int = 12
) -> ReplicaEstimator:
    """Worker 1.1 is as others for some iterations, and then `odd`."""
    for i in range(healthy + 12):
        rows = {w: row(w, queued) for w in range(STAGES * REPLICAS)}
        if i >= healthy:
            rows[WORKER] = odd
        e.update(e.usable(rows))
        e.accept()
    return e


@pytest.mark.parametrize(
    ("odd", "times", "share"),
    [
        (row(WORKER, idle=7.0), 8.0, 1 / 8),  # suspended: it leaves its core to others
        (row(WORKER, idle=7.0, queued=0.5), 8.0, 1 / 8),  # what it queues is as for others
        (row(WORKER, slow=3.0, queued=0.5), 3.0, 1.0),  # a slower clock
        (row(WORKER, queued=4.5), 5.0, 1 / 5),  # a quota, or other programs on its core
    ],
)
def test_why_a_worker_is_slow_decides_what_it_takes_of_the_cores(
    odd: StageReport, times: float, share: float
) -> None:
    e = fed(estimator(), odd, queued=0.5)
    c = e.conditions()
    assert c.cores == 2.0
    assert c.pipeline.forward == pytest.approx((4 * MS,) * STAGES)
    assert c.pipeline.core_share == (1.0,) * STAGES
    assert c.slow == e.slow() == {WORKER: pytest.approx(times)}
    assert c.core_share == {WORKER: pytest.approx(share)}


def test_all_that_wait_are_healthy() -> None:
    """As where a machine with more cores is emulated."""
    e = estimator()
    for _ in range(12):
        e.update(e.usable({w: row(w, idle=9.0) for w in range(STAGES * REPLICAS)}))
    c = e.conditions()
    assert c.pipeline.forward == pytest.approx((40 * MS,) * STAGES)
    assert c.pipeline.core_share == pytest.approx((0.1,) * STAGES)
    assert c.slow == {}


@pytest.mark.parametrize(
    ("hosts", "cores", "counted"),
    [("aabb", 1.0, True), ("abab", None, True), ("aaaa", None, True), ("aaaa", 2.0, True),
     ("aaaa", 5.0, True), ("aaaa", 1.0, False)],
)  # fmt: skip
def test_else_all_is_by_the_wall_clock(hosts: str, cores: float | None, counted: bool) -> None:
    """On several machines, with cores enough, or where nobody counts what threads queue."""
    odd = row(WORKER, idle=7.0, queued=0.5)
    found = []
    for one in (estimator(hosts, cores), estimator(hosts, None)):
        for i in range(24):
            rows: Mapping[int, StageReport] = {w: row(w, 0.5) for w in range(3)} | {
                WORKER: odd if i >= 12 else row(WORKER, 0.5)
            }
            if not counted:
                rows = {w: replace(r, queued={}, idle={}) for w, r in rows.items()}
            one.update(one.usable(rows))
            one.accept()
        found.append(one.conditions())
    c, today = found
    assert (c.cores, c.core_share, c.pipeline.core_share) == (None, {}, ())
    assert c.pipeline.forward == pytest.approx((6 * MS,) * STAGES)
    assert c.slow == {WORKER: pytest.approx(8.5 / 1.5)}
    assert c == today
