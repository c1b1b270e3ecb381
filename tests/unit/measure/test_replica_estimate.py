"""What is known of several replicas: healthy seconds, slow workers, and paths between workers."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measure.records import report

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.config import Budget
from megatron_adaptra.ir.conditions import LinkState
from megatron_adaptra.ir.op import Op
from megatron_adaptra.ir.routes import Path
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.measure.estimate import Estimator
from megatron_adaptra.measure.link_estimates import LONGEST
from megatron_adaptra.measure.replica_estimate import STALE, ReplicaEstimator
from megatron_adaptra.measure.report import LinkSample, Memory, StageReport, Step, StockOp
from megatron_adaptra.plan.pipeline.fixed import first_schedule

MS = 1e-3
STAGES, COUNT = 3, 4
OWN = [
    (r * STAGES + a, r * STAGES + b) for r in (0, 1) for a, b in ((0, 1), (1, 0), (1, 2), (2, 1))
]


def estimator(replicas: int = 2, hosts: str = "aaa", **more: object) -> ReplicaEstimator:
    """`hosts`: of each replica, a letter per stage."""
    firsts = range(0, replicas * STAGES, STAGES)
    return ReplicaEstimator(
        [Estimator(COUNT, list(hosts), None, 1 << 20, first=first, **more) for first in firsts]  # type: ignore[arg-type]
    )


def reports(
    slow: Mapping[int, float] | None = None,
    paths: Mapping[Path, float] | None = None,
    *,
    replicas: int = 2,
    probed: Mapping[Path, float] | None = None,
    clock: Mapping[int, float] | None = None,
) -> dict[int, StageReport]:
    """Of an iteration.

    Args:
        slow: factors, by worker.
        paths: what messages take; by default 0.1 ms, between the neighbours at home.
        replicas: of 3 stages.
        probed: the same of probes.
        clock: by worker, seconds by which its clock is ahead.
    """
    carried = dict.fromkeys(OWN, 0.1 * MS) if paths is None else paths
    found = {}
    for worker in range(replicas * STAGES):
        times, ahead = (slow or {}).get(worker, 1.0), (clock or {}).get(worker, 0.0)

        def seen(rows: Mapping[Path, float], to: int, ahead: float) -> dict[int, float]:
            return {
                a: s + ahead - (clock or {}).get(a, 0.0) for (a, b), s in rows.items() if b == to
            }

        wall = {"F": times * 10 * MS, "B": times * 20 * MS}
        mine, small = seen(carried, worker, ahead), seen(probed or {}, worker, ahead)
        links = {source: LinkSample(s, s, s, 1.0) for source, s in mine.items()}
        for source, s in small.items():
            links[source] = replace(links.get(source, LinkSample()), probed=s)
        found[worker] = report(worker, wall=wall, links=links)
    return found


def fed(e: ReplicaEstimator, count: int = 10, **more: object) -> list[tuple[int, object]]:
    """What has changed in so many iterations, by iteration."""
    found = []
    for i in range(count):
        changed = e.update(e.usable(reports(**more)))  # type: ignore[arg-type]
        if changed.any:
            found.append((i, changed))
            e.accept()
    return found


def test_seconds_are_those_of_a_healthy_worker() -> None:
    e = estimator()
    assert not e.known
    assert fed(e) == []
    assert e.known
    assert e.calibrated
    fed(e, slow={4: 2.0})
    c = e.conditions()
    assert c.slow == {4: pytest.approx(2.0)}
    assert c.pipeline.forward == pytest.approx((10 * MS,) * STAGES)
    assert c.seconds(Op.parse("F0").kind, 4) == pytest.approx(20 * MS)
    assert c.paths == {}


def test_a_stage_of_which_all_workers_are_slow_has_slow_seconds() -> None:
    e = estimator()
    fed(e)
    fed(e, slow={1: 3.0, 4: 3.0})
    c = e.conditions()
    assert c.slow == {}
    assert c.pipeline.forward == pytest.approx((10 * MS, 30 * MS, 10 * MS))


def test_a_slow_path_stands_beside_what_is_normal_between_its_stages() -> None:
    e = estimator()
    fed(e)
    slow = {(1, 2): 40 * MS, (2, 1): 40 * MS}
    found = fed(e, paths=dict.fromkeys(OWN, 0.1 * MS) | slow)
    assert [changed.paths for _, changed in found] == [[(1, 2), (2, 1)]]  # type: ignore[attr-defined]
    c = e.conditions()
    assert c.paths == {path: LinkState(pytest.approx(40 * MS)) for path in slow}
    assert c.pipeline.links[1, 2].delay == pytest.approx(0.1 * MS)
    assert e.delays()["0.1>0.2"] == pytest.approx(40 * MS)


@pytest.mark.parametrize("clocks", [{}, {1: 5.0, 2: -3.0, 4: 100.0, 5: 7.0}])
def test_a_home_path_that_carries_nothing_is_measured_by_its_probes(
    clocks: Mapping[int, float],
) -> None:
    """Partners are exchanged: 0.1 with 1.2. On hosts of their own, there and back count."""
    hosts = "abc" if clocks else "aaa"
    e = estimator(hosts=hosts)
    slow = dict.fromkeys(OWN, 0.1 * MS) | {(1, 2): 40 * MS, (2, 1): 40 * MS}
    fed(e, paths=slow, probed=slow, clock=clocks)
    swapped = {(0, 1): 0.1 * MS, (1, 0): 0.1 * MS, (3, 4): 0.1 * MS, (4, 3): 0.1 * MS}
    swapped |= {(1, 5): 0.2 * MS, (5, 1): 0.2 * MS, (4, 2): 0.2 * MS, (2, 4): 0.2 * MS}
    assert fed(e, paths=swapped, probed=slow, clock=clocks) == []
    assert e.delays()["0.1>0.2"] == pytest.approx(40 * MS)
    assert e.delays()["0.1>1.2"] == pytest.approx(0.2 * MS)
    healed = dict.fromkeys(OWN, 0.1 * MS)
    found = fed(e, paths=swapped, probed=healed, clock=clocks)
    assert [changed.paths for _, changed in found] == [[(1, 2), (2, 1)]]  # type: ignore[attr-defined]
    assert e.conditions().paths == {}


def swap() -> Schedule:
    """0.1 with 1.2, and 1.1 with 0.2."""
    lines = list(first_schedule(STAGES, COUNT, math.inf).replicated(2).order)
    lines[2], lines[5] = lines[5], lines[2]
    return Schedule(tuple(lines), COUNT, replicas=2)


def test_a_cross_path_counts_as_healthy_and_is_not_proven_until_it_is_measured() -> None:
    e = estimator()
    fed(e)
    cross = [(1, 5), (2, 4), (4, 2), (5, 1)]
    assert e.unproven(swap()) == cross
    assert e.unproven(first_schedule(STAGES, COUNT, math.inf).replicated(2)) == []
    assert e.conditions().link(1, 5) == e.conditions().pipeline.link(1, 2)
    slow = dict.fromkeys(cross, 0.1 * MS) | {(1, 5): 30 * MS}
    fed(e, 2, probed=slow)
    assert e.unproven(swap()) == cross, "two probes are too few"
    fed(e, 3, probed=slow)
    assert e.unproven(swap()) == []
    assert e.conditions().paths == {(1, 5): LinkState(pytest.approx(30 * MS))}


def test_a_slow_cross_path_is_no_link_of_either_replica() -> None:
    """0.1 sends to 1.2, to which 1.1 sends probes alone."""
    e = estimator()
    fed(e)
    home = dict.fromkeys(OWN, 0.1 * MS)
    carried = {path: s for path, s in home.items() if path not in [(4, 5), (5, 4)]}
    fed(e, paths=carried | {(1, 5): 30 * MS, (5, 1): 0.1 * MS}, probed=home)
    assert e.conditions().paths == {(1, 5): LinkState(pytest.approx(30 * MS))}


def test_a_cross_path_that_nothing_was_sent_over_for_long_is_not_proven_any_more() -> None:
    e = estimator()
    fed(e, probed={(1, 5): 30 * MS})
    assert e.proven((1, 5))
    fed(e, STALE)
    assert e.proven((1, 5))
    fed(e, 1)
    assert not e.proven((1, 5))
    assert e.conditions().paths == {}


def test_a_lost_path_is_used_by_no_plan_until_it_is_measured() -> None:
    e = estimator()
    fed(e)
    e.lost([(1, 5), (5, 1)])
    assert e.conditions().paths == dict.fromkeys([(1, 5), (5, 1)], LinkState(LONGEST))
    fed(e, 5, probed={(1, 5): 0.1 * MS})
    assert e.conditions().paths == {(5, 1): LinkState(LONGEST)}
    e.forget_lost()
    assert e.conditions().paths == {}


def test_a_worker_without_a_microbatch_keeps_its_seconds() -> None:
    e = estimator()
    fed(e)
    fed(e, slow={4: 9.0})
    for _ in range(20):
        rows = reports(slow={4: 9.0})
        rows[4] = replace(rows[4], wall={}, cpu={})
        e.update(e.usable(rows))
    assert e.conditions().slow == {4: pytest.approx(9.0)}
    assert e.conditions().pipeline.forward == pytest.approx((10 * MS,) * STAGES)


def test_the_step_is_that_of_the_replica_that_waits_for_nobody() -> None:
    e = estimator()
    for _ in range(8):
        rows = reports()
        rows[0] = replace(rows[0], step=Step(0.5))  # waits for replica 1
        rows[3] = replace(rows[3], step=Step(0.01))
        e.update(e.usable(rows))
    assert e.conditions().pipeline.step_seconds == pytest.approx(0.01)


def test_budgets_are_per_worker() -> None:
    e = estimator(budget=Budget(nbytes=1000.0), at_first=(3.0, 2.0, 1.0))
    assert e.budgets == (3.0, 2.0, 1.0) * 2
    rows = {
        w: replace(r, memory=Memory(1.0, 100, per_microbatch=100 * (1 + w)))
        for w, r in reports().items()
    }
    assert e.measure_budget(e.usable(rows))
    assert e.budgets == (10.0, 5.0, 3.0, 2.0, 2.0, 1.0)
    fed(e)
    assert e.conditions().activation_budget == e.budgets


def test_over_megatrons_own_messages() -> None:
    """Ops name their homes; a report that is missing costs its replica an iteration."""
    e = estimator()
    lines = first_schedule(STAGES, COUNT, math.inf).replicated(2).order
    for i in range(12):
        rows = reports(paths={})
        for worker, line in enumerate(lines):
            ops = tuple(
                StockOp(str(op), 1.0 + k, 2.0 + k, 1.0 + k, 0.0) for k, op in enumerate(line)
            )
            rows[worker] = replace(rows[worker], ops=ops)
        if i == 5:
            del rows[4]
        e.update(e.usable(rows))
    assert e.calibrated


def numbers() -> st.SearchStrategy[float]:
    return st.floats() | st.sampled_from([1e300, -1e300, 1e17, 4000.0, 0.0])


@given(st.lists(st.tuples(st.integers(-1, 7), st.integers(0, 9), numbers()), max_size=12))
def test_nonsense_raises_nothing_and_names_nobody(spoilt: list[tuple[int, int, float]]) -> None:
    e = estimator()
    fed(e, 6)
    rng = random.Random(len(spoilt))
    for worker, what, value in spoilt:
        rows = reports()
        old = rows.get(worker, rows[0])
        rows[worker] = [
            replace(old, wall={"F": value, "B": 0.02}), replace(old, wall={"B": value}),
            replace(old, links={rng.randrange(7): LinkSample(value)}),
            replace(old, links={3: LinkSample(probed=value)}),
            replace(old, overhead=value), replace(old, step=Step(value)),
            replace(old, memory=Memory(value, 100, 100)), replace(old, worker=7),
            replace(old, ops=(StockOp("X0", value, 1.0, 1.0, 1.0),)),
            replace(old, wall={"F": 0.01, "I": value}),
        ][what]  # fmt: skip
        if not e.update(e.usable(rows)).any:
            e.measure_budget(e.usable(rows))
            e.conditions()
    fed(e, 6)
    assert e.conditions().slow == {}


def test_what_is_planned_for_outlives_a_restart() -> None:
    e = estimator(hosts="aba")
    paths = dict.fromkeys(OWN, 0.1 * MS) | {(4, 5): 40 * MS, (5, 4): 40 * MS}
    fed(e, paths=paths)
    settings = json.loads(json.dumps(e.settings()))
    again = ReplicaEstimator(
        [Estimator.from_settings(one, i * STAGES) for i, one in enumerate(settings)]
    )
    for one in again.estimators:
        one.resume(json.loads(json.dumps(e.state())))
    assert again.state() == e.state()
    assert e.state()["4>5"] == pytest.approx(40 * MS, rel=0.01)
    for _ in range(5):
        assert not again.update(reports(paths=paths)).any
    assert again.conditions() == e.conditions()


@pytest.mark.parametrize("value", [-1e-9, 4000.0, math.nan, math.inf])
def test_what_cannot_be_is_left_out(value: float) -> None:
    e, rows = estimator(), reports()
    rows[1] = replace(rows[1], wall={"F": value, "B": 0.02})
    rows[2] = replace(rows[2], cpu={"F": value})
    rows[9] = rows[3]
    rows[4] = replace(rows[4], worker=1)
    assert sorted(e.usable(rows)) == [0, 3, 5]


@pytest.mark.parametrize("other", [(COUNT, 2, 1), (5, STAGES, 1), (COUNT, STAGES, 2)])
def test_replicas_that_differ_are_refused(other: tuple[int, int, int]) -> None:
    count, stages, chunks = other
    one = Estimator(COUNT, ["one"] * STAGES, None, 8)
    odd = Estimator(count, ["one"] * stages, None, 8, chunks=chunks)
    with pytest.raises(BadInput):
        ReplicaEstimator([one, odd])
    with pytest.raises(BadInput, match="replicas 1: at least 2"):
        ReplicaEstimator([one])
