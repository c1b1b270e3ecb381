"""What the demo compares where replicas have one plan: all workers, by their names."""

from __future__ import annotations

import math

import pytest
from measure.records import record

from megatron_adaptra.adapt.schedules.decisions import PlanDecision
from megatron_adaptra.demo.comparison import Outlook, Ran, compare, why_off
from megatron_adaptra.demo.results import RankResult, _arm_reports, _delays_ms
from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.timeline import Span, Timeline
from megatron_adaptra.plan.pipeline.fixed import first_schedule
from megatron_adaptra.plan.routes.reroute import evaluate_replicas, plan_replicas

PIPELINE = Conditions(4, (0.01,) * 2, (0.01,) * 2, (0.01,) * 2)
SLOW = ReplicaConditions(PIPELINE, 2, slow={3: 3.0}, paths={(0, 3): LinkState(0.02)})
START = first_schedule(2, 4, math.inf).replicated(2)
STOCK = evaluate_replicas(START, SLOW).timeline
PLAN = plan_replicas(SLOW)


def made(iteration: int) -> PlanDecision:
    return PlanDecision(
        number=0, iteration=iteration, detected=iteration - 2, kinds=["schedule"], links=[],
        why="", warmup_before=[2, 1, 2, 1], warmup_after=list(PLAN.schedule.warmup),
        predicted_ms=1e3 * PLAN.predicted, predicted_without_ms=0.0, stock=STOCK,
        lower_bound_ms=0.0, planning_ms=0.0, digest="", plan=PLAN.schedule.text(),
        conditions=SLOW.to_json(),
    )  # fmt: skip


def test_a_plan_for_all_replicas_is_compared_under_its_conditions() -> None:
    healthy = ReplicaConditions(PIPELINE, 2)
    outlook = Outlook(healthy, evaluate_replicas(START, healthy).timeline)
    ms = {"stock": [300.0] * 20, "adaptra": [300.0] * 10 + [200.0] * 10}
    found = compare((6, 18), [made(10)], ms, START, outlook, evaluate_replicas)
    assert found is not None
    assert (found.iterations, found.since) == (range(11, 18), 10)
    assert found.plan.conditions == SLOW
    assert found.plan.schedule.same_as(PLAN.schedule)
    assert found.predicted_ms["adaptra"] == pytest.approx(1e3 * PLAN.predicted)
    assert found.predicted_ms["stock"] == pytest.approx(1e3 * STOCK.makespan)
    assert found.measured_ms == {"stock": 300.0, "adaptra": 200.0}


def test_what_explains_a_prediction_is_named_by_workers() -> None:
    """And ops of every replica count: only worker 1.1 takes longer than predicted."""
    ms = 1e3 * PLAN.predicted
    rows = {8: {"0.0>0.1": 0.0}, 9: {"0.0>0.1": 0.0, "0.0>1.1": 0.52}}
    ran = Ran("adaptra", range(8, 10), ms, 3 * ms, SLOW)
    assert "path 0.0>1.1 took 520 ms, planned 20 ms" in why_off(ran, rows, None)
    longer = Timeline(
        tuple(s._replace(end=s.start + 8 * (s.end - s.start)) if s.stage == 3 else s
              for s in STOCK.spans),
        (), "", 2, 2,
    )  # fmt: skip
    ran = Ran("stock", range(8, 10), ms, 3 * ms, SLOW, (STOCK, longer))
    assert "its forwards and backwards took" in why_off(ran, {}, None)


def test_a_path_that_is_opened_later_has_no_delay_before() -> None:
    delays = _delays_ms({1: {"0.0>0.1": 0.001}, 3: {"0.0>0.1": 0.002, "0.0>1.1": 0.04}})
    assert delays["0.0>0.1"] == [0.0, 1.0, 1.0, 2.0]
    assert [x for x in delays["0.0>1.1"] if not math.isnan(x)] == [40.0]
    assert math.isnan(delays["0.0>1.1"][0])


def test_an_iteration_of_replicas_ends_with_the_last_of_them() -> None:
    f, step = Op(Kind.F, 0, home=0), Op(Kind.STEP, 0)
    spans = (
        Span(0, f, 1.0, 2.0), Span(0, step, 2.0, 3.0), Span(2, f._replace(home=1), 0.5, 2.0),
        Span(2, step, 2.0, 4.0), Span(3, step, 2.0, 9.0),
    )  # fmt: skip
    assert Timeline(spans, (), "", 2, 2).iteration == 3.5
    assert Timeline(spans[:2]).iteration == 2.0


def of_rank(stage: int, iterations: range) -> RankResult:
    """A rank whose records end with `iterations`, as they do once its adaptation has failed."""
    kept = [record(stage, i, {}) for i in iterations]
    records = {"stock": kept, "adaptra": kept}
    return RankResult(stage, {}, {}, 0.0, records, [], [], "", [])


@pytest.mark.parametrize(("last", "drawn"), [(18, True), (13, True), (10, False)])
def test_drawn_is_an_iteration_that_all_ranks_have_recorded(last: int, drawn: bool) -> None:
    healthy = ReplicaConditions(PIPELINE, 2)
    outlook = Outlook(healthy, evaluate_replicas(START, healthy).timeline)
    ms = {"stock": [300.0] * 20, "adaptra": [300.0] * 10 + [200.0] * 5 + [190.0] * 5}
    found = compare((6, 18), [made(10)], ms, START, outlook, evaluate_replicas)
    assert found is not None
    ranks = [of_rank(worker, range(10, 18 if worker != 1 else last)) for worker in range(4)]
    reports = _arm_reports(ms, ranks, 2, found)
    assert [report.measured is not None for report in reports] == [drawn, drawn]
