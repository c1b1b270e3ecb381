"""What the demo's report compares: one plan, the iterations that it ran, and what was predicted."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.common import both_ways
from megatron_adaptra.adapt.schedules.decisions import PlanDecision
from megatron_adaptra.demo.comparison import Comparison, Outlook, compare, lives, why_off
from megatron_adaptra.demo.cpu_load import Load
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.plan import Plan, make_plan
from megatron_adaptra.plan.pipeline.base import evaluate

SLOW = Conditions(12, (0.004,) * 4, (0.004,) * 4, (0.004,) * 4, both_ways({2: 0.04}))
START, DEEP = make_plan(SLOW, "1f1b"), make_plan(SLOW, "warmup")
PHASE = (8, 16)
IDLE = Load(own=0.4, others=0.01, steal=0.0)
ARMS = ("stock", "adaptra")


class Made:
    """A decision that came into force, as far as the comparison asks."""

    def __init__(self, iteration: int, plan: Plan, conditions: Conditions = SLOW) -> None:
        self.iteration, self.plan = iteration, plan.schedule.text()
        self.warmup_after = list(plan.schedule.warmup)
        self.conditions, self.stock = conditions.to_json(), START.timeline


def decided(*made: Made) -> list[PlanDecision]:
    return list(made)  # type: ignore[arg-type]


def compared(decisions: list[PlanDecision], ms: list[float]) -> Comparison:
    healthy = Outlook(SLOW.healthy(), START.timeline)
    found = compare(PHASE, decisions, dict.fromkeys(ARMS, ms), START.schedule, healthy, evaluate)
    assert found is not None
    return found


def test_what_ran_before_the_plan_is_not_compared_with_it() -> None:
    """Median of a phase of which half ran under 1F1B: 430, beside a prediction of 160."""
    ms = [100.0] * 8 + [430.0] * 4 + [200.0, 160.0, 150.0, 170.0] + [100.0] * 8
    found = compared(decided(Made(12, DEEP), Made(20, START)), ms)
    assert found.iterations == range(13, 16)
    assert found.measured_ms["adaptra"] == 160.0
    assert found.plan.schedule.same_as(DEEP.schedule)
    assert found.predicted_ms["adaptra"] == pytest.approx(1e3 * DEEP.predicted)
    assert found.why_not_the_last == ""


@pytest.mark.parametrize("last", [15, 14])
def test_a_plan_without_a_whole_iteration_gives_way_to_the_one_before(last: int) -> None:
    ms = [100.0] * 8 + [430.0] * 16
    found = compared(decided(Made(last, DEEP)), ms)
    if last == 14:  # iteration 15 is a whole one
        assert found.iterations == range(15, 16)
        assert found.plan.schedule.same_as(DEEP.schedule)
        return
    assert found.iterations == range(8, 15)
    assert found.plan.schedule.same_as(START.schedule)
    # As the links were then, not as they were at the end.
    assert found.predicted_ms["adaptra"] == pytest.approx(1e3 * START.predicted)
    assert "warmup" in found.why_not_the_last
    assert "iteration 15" in found.why_not_the_last


def test_lives_share_no_iteration_and_none_is_mixed() -> None:
    made = decided(Made(5, DEEP), Made(9, START), Made(12, DEEP), Made(30, START))
    found = lives(PHASE, made)
    assert [life.iterations for life in found] == [range(8, 9), range(10, 12), range(13, 16)]
    assert [life.decision for life in found] == made[:3]


def off(ms: float, measured: Timeline, load: Load | None = IDLE, **delays: float) -> str:
    found = compared(decided(Made(12, DEEP)), [ms] * 24)
    links = {f"{a}>{b}": SLOW.link(a, b).delay for a, b in SLOW.links}
    rows: dict[int, Any] = {i: {**links, **delays} for i in range(24)}
    return why_off(found.ran("adaptra", measured), rows, load)


def test_a_prediction_that_is_off_is_explained() -> None:
    right = 1e3 * DEEP.predicted
    busy = IDLE._replace(others=0.48, steal=0.05)
    assert off(1.1 * right, DEEP.timeline, busy) == ""
    text = off(1.5 * right, DEEP.timeline, busy)
    assert text.startswith("adaptra took 50 % longer than predicted: the machine was busy")
    assert "other processes used 48 % of its CPU time (5 % stolen by the host)" in text
    longer = Timeline(
        tuple(s._replace(end=s.start + 1.5 * (s.end - s.start)) for s in DEEP.timeline.spans)
    )
    assert "forwards and backwards took 50 % longer" in off(1.5 * right, longer)
    assert "link 2->3 took 140 ms, planned 40 ms" in off(2 * right, DEEP.timeline, **{"2>3": 0.140})
    assert "neither ops, optimizer step, links nor" in off(1.5 * right, DEEP.timeline)
    assert "forwards and backwards" not in off(0.5 * right, longer), "it works the other way"
    assert off(0.5 * right, DEEP.timeline).startswith("adaptra took 50 % less than predicted")
