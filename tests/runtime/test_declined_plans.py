"""A plan that gained too little by a few samples is looked at again once there are more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from runtime import replica_job
from runtime.fed_job import FedJob
from runtime.pipeline import schedule
from seeding import new_seed
from telemetry.records import job

from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan import Plan
from megatron_adaptra.plan.fixed.baselines import stock_warmup
from megatron_adaptra.runtime.base_replanner import AGAIN, LEARN
from megatron_adaptra.runtime.replan_policy import ReplanPolicy
from megatron_adaptra.runtime.replanner import Replanner
from megatron_adaptra.sim.clock import simulate
from megatron_adaptra.telemetry.estimate import Estimator
from megatron_adaptra.telemetry.iteration_record import IterationRecord, OpTime
from megatron_adaptra.transport.base import Stamps

MS = 1e-3
COUNT, FORWARD, BACKWARD = 6, 45 * MS, 45 * MS
HEALTHY, SLOW = 2 * MS, 37 * MS  # a plan for it saves 17 %; beside longer ops, less than 15 %
SLOW_FROM = 5
HALF_SPEED = {4: 2.0}  # worker 1.1 of 2 x 3


class Counting(ReplanPolicy):
    """`made`: so many plans."""

    made = 0

    def make_plan(self, conditions: Conditions) -> Plan:
        type(self).made += 1
        return super().make_plan(conditions)


def records(ran: Schedule, iteration: int, delay: float, held: float) -> list[IterationRecord]:
    """What both stages measure; before the first one's last op something holds it up."""
    costs = {"forward": FORWARD, "backward": BACKWARD, "count": COUNT}
    timeline = simulate(lower(ran), job({(0, 1): delay, (1, 0): delay}, 2, **costs), "eager")
    both = []
    for stage in (0, 1):
        one = IterationRecord(stage, iteration, 9.0, 9.0 + timeline.makespan + held)
        spans = [s for s in timeline.spans if s.stage == stage and s.op.kind.computes]
        *most, last = sorted(spans, key=lambda s: s.start)
        one.ops += [OpTime(s.op, 9 + s.start, 9 + s.end, 0.0) for s in most]
        late = 9 + held * (stage == 0)
        one.ops.append(OpTime(last.op, late + last.start, late + last.end, 0.0))
        for m in timeline.messages:
            if m.target == stage:
                stamps = Stamps(9 + m.sent, 8.0, 9 + m.arrived, eager=True, nbytes=1000)
                one.messages.append((m.source, m.op, stamps))
        both.append(one)
    return both


def train(
    iterations: int, slow: float, held: Mapping[int, float], healed: int | None = None
) -> tuple[FedJob[Plan, Conditions], ReplanPolicy]:
    """Two stages whose link takes `slow` seconds until it has `healed`.

    `held`: seconds for which an iteration is held up.
    """
    rule = type("Counted", (Counting,), {})(sends="eager")
    start = schedule(stock_warmup(2, COUNT), COUNT)
    estimator = Estimator(COUNT, ["one"] * 2, None, 1000, on_device=True)
    fed: FedJob[Plan, Conditions] = FedJob(start, Replanner(start, estimator, rule))
    before: list[IterationRecord | None] = [None, None]
    for iteration in range(iterations):
        fed.close_if_due(iteration)
        delay = slow if SLOW_FROM <= iteration < (healed or iterations) else HEALTHY
        now = records(fed._in_force, iteration, delay, held.get(iteration, 0.0))
        fed.feed(iteration, [r.report(b) for r, b in zip(now, before, strict=True)])
        before = [*now]
    return fed, rule


@pytest.mark.parametrize("held", [(), (3,), (3, 7)])
def test_held_up_iterations_do_not_hide_a_slow_link_for_good(held: tuple[int, ...]) -> None:
    """Iterations 3, 7 and so on are those that the model is compared with."""
    fed, _ = train(40, SLOW, dict.fromkeys(held, 0.5))
    assert fed.swaps == [SLOW_FROM + 3 if not held else {1: 14, 2: 22}[len(held)]], fed.reasons
    (why,) = (why for _, why in fed.reasons)
    assert "link 0->1 takes 37 ms, before 2 ms" in why
    assert fed.ran[-1].warmup > fed.start.warmup


def test_what_really_gains_too_little_is_looked_at_for_a_while() -> None:
    fed, rule = train(300, 25 * MS, {})
    assert fed.changes == {}
    assert 2 <= rule.made <= 2 + AGAIN // 4


def test_a_link_that_has_healed_is_looked_at_no_more() -> None:
    fed, rule = train(9, SLOW, {3: 0.5})
    made = rule.made
    fed, rule = train(60, SLOW, {3: 0.5}, healed=9)
    assert fed.changes == {}
    assert rule.made == made + 1  # as it healed


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker but the slow one ever takes longer."""
    monkeypatch.setattr(replica_job, "BURSTS", 0.0)


def declined(seed: int, healed: bool = False) -> tuple[replica_job.Job, list[int]]:
    """A training of replicas with a slow worker, for which no plan gained enough by a few samples.

    With the iterations of all searches for routes. `healed`: the worker is fast again.
    """
    job, searches = replica_job.Job(seed=seed), []
    search = job.replanner._search

    def counted(*args: Any) -> Sequence[Schedule]:
        searches.append(len(job.ran))
        return search(*args)

    job.replanner._search = counted
    job.train(20)
    enough, job.replanner.rule = job.replanner.rule, replace(job.replanner.rule, min_gain=0.9)
    for _ in range(20):
        if not job.stays:
            job.train(1, slow=HALF_SPEED)
    assert job.stays
    assert job.changes == {}, job.reasons
    if healed:
        job.train(12, slow={})
    job.replanner.rule = enough
    return job, searches


def test_a_slow_worker_whose_plans_were_declined_is_looked_at_again(steady: None) -> None:
    job, searches = declined(new_seed())
    first = searches[-1]
    job.train(2 * LEARN)
    (change,) = job.changes.values()
    assert change.why.startswith("worker 1.1 takes "), job.reasons
    assert searches[-1] - first <= LEARN + 1
    assert len(job.stays) == 1, "why nothing changed is logged once"


def test_a_slow_worker_for_whom_nothing_gains_enough_is_looked_at_for_a_while(steady: None) -> None:
    job, searches = declined(new_seed())
    job.replanner.rule = replace(job.replanner.rule, min_gain=0.9)
    before = len(searches)
    job.train(3 * AGAIN)
    assert job.changes == {}
    assert 2 <= len(searches) - before <= AGAIN // LEARN


def test_a_worker_that_is_fast_again_is_looked_at_no_more(steady: None) -> None:
    job, searches = declined(new_seed(), healed=True)
    before = len(searches)
    job.train(2 * AGAIN)
    assert job.changes == {}, job.reasons
    assert len(searches) == before
