"""Whole pipelines that exchange partners, and one microbatch that goes back to an idle worker."""

from __future__ import annotations

import math

import pytest

from megatron_adaptra.ir.check import check
from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan.pipeline.base import Plan, evaluate, make_plan
from megatron_adaptra.plan.pipeline.fixed import first_schedule
from megatron_adaptra.plan.routes.chains import swapped_chains
from megatron_adaptra.plan.routes.reroute import evaluate_replicas, plan_replicas
from megatron_adaptra.plan.routes.shares import one_back
from megatron_adaptra.plan.routes.swaps import chain_schedules

STAGES, COUNT = 3, 6


def job(replicas: int = 2, budget: tuple[float, ...] = (), **more: object) -> ReplicaConditions:
    one = (1.0,) * STAGES
    pipeline = Conditions(COUNT, one, one, one, split=False)
    return ReplicaConditions(pipeline, replicas, activation_budget=budget, **more)  # type: ignore[arg-type]


def schedules(c: ReplicaConditions) -> list[Schedule]:
    def deeper(one: Conditions) -> Plan:
        return make_plan(one, "warmup")

    return list(chain_schedules(c, first_schedule(STAGES, COUNT, math.inf), evaluate, deeper))


def test_a_chain_has_the_seconds_links_and_memory_of_its_workers() -> None:
    paths = {(1, 5): LinkState(3.0), (5, 1): LinkState(4.0), (1, 2): LinkState(9.0)}
    c = job(budget=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0), slow={5: 2.0}, paths=paths)
    one = c.chain([0, 1, 5])
    assert one.forward == (1.0, 1.0, 2.0)
    assert one.backward_input == one.backward_weight == one.forward
    assert one.activation_budget == (1.0, 2.0, 6.0)
    assert one.links[1, 2] == LinkState(3.0)
    assert one.links[2, 1] == LinkState(4.0)
    assert one.links[0, 1] == LinkState()


def test_each_replica_alone_is_the_same_as_one() -> None:
    one = first_schedule(STAGES, COUNT, math.inf)
    c = job(slow={1: 2.0})
    both = evaluate_replicas(one.replicated(2), c)
    alone = [evaluate(one, c.chain(chain)).predicted for chain in ([0, 1, 2], [3, 4, 5])]
    assert both.predicted == pytest.approx(max(alone))
    assert both.schedule.routes.moved == {}


def test_the_cheapest_first_and_each_runs() -> None:
    """Deeper warmups at home; other partners; both. On each worker all ops are of one home."""
    slow = {(1, 2): LinkState(4.0), (2, 1): LinkState(4.0)}
    c = job(paths=slow)
    found = schedules(c)
    names = [(one.policy, one.warmup) for one in found]
    assert names == [
        ("warmup", found[0].warmup), ("swap", (3, 2, 1) * 2), ("swap", (3, 2, 1) * 2)
    ]  # fmt: skip
    assert found[0].warmup[:3] > (3, 2, 1)
    assert found[0].warmup[3:] == (3, 2, 1), "nothing is slow there"
    for one in found:
        check(lower(one), c.activation_budget)
        assert all(len({op.home for op in line}) == 1 for line in one.order)
    seconds = [evaluate_replicas(one, c).predicted for one in found]
    healthy = evaluate_replicas(first_schedule(STAGES, COUNT, math.inf).replicated(2), job())
    assert seconds[1] == pytest.approx(healthy.predicted)
    assert seconds[0] > seconds[1]


def test_slow_workers_are_gathered_and_others_stay_at_home() -> None:
    """In one pipeline they cost the time of one; a single one has nobody to go to."""
    assert list(swapped_chains(job(slow={4: 2.0}))) == []
    assert list(swapped_chains(job(slow={1: 2.0}))) == []
    both = [[[0, 1, 5], [3, 4, 2]]]
    assert list(swapped_chains(job(slow={1: 2.0, 5: 2.0}))) == both
    assert list(swapped_chains(job(slow={4: 2.0, 2: 2.0}))) == both


def test_a_worker_gets_one_microbatch_back() -> None:
    c = job(slow={4: 50.0})
    plan = plan_replicas(c, ops=20_000)
    assert not plan.schedule.order[4]
    with_one = one_back(plan.schedule, 4, lambda one: evaluate_replicas(one, c).predicted)
    check(lower(with_one), c.activation_budget)
    (forward, backward) = with_one.order[4]
    assert (forward.home, backward.home) == (1, 1)
    assert len(with_one.order[1]) == len(plan.schedule.order[1]) - 2
    every = [evaluate_replicas(back(plan.schedule, k), c).predicted for k in range(COUNT)]
    assert evaluate_replicas(with_one, c).predicted == min(every) < max(every)


def back(schedule: Schedule, microbatch: int) -> Schedule:
    """With this one on the idle worker."""
    return one_back(schedule, 4, lambda one: abs(one.order[4][0].microbatch - microbatch))
