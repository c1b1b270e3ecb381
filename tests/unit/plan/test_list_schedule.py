"""The list scheduler of replicas: any routes and rules give an order that runs, in memory."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from ir.strategies import random_replica_conditions, random_schedule, seeds

from megatron_adaptra.ir.check import check
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.plan.routes.list_schedule import (
    Made,
    Rule,
    Runs,
    Workers,
    list_schedule,
)
from megatron_adaptra.sim.clock import simulate


def any_job(rng: random.Random, narrow: bool) -> ReplicaConditions:
    shape = rng.randint(1, 4), rng.randint(1, 5)
    c = random_replica_conditions(rng, random_schedule(rng, *shape, replicas=rng.randint(2, 4)))
    budget = tuple(float(rng.randint(1, 6)) for _ in range(c.workers))
    message_bytes = 1.0 if narrow else 0.0
    pipeline = replace(c.pipeline, split=rng.random() < 0.5, message_bytes=message_bytes)
    return replace(c, pipeline=pipeline, activation_budget=budget)


def any_runs(rng: random.Random, c: ReplicaConditions) -> Runs:
    """Each unit at each stage at home, or on any worker of that stage."""
    moved = rng.random()
    return [
        [
            (rng.randrange(c.replicas) if rng.random() < moved else unit // c.microbatches)
            * c.stages
            + stage
            for unit in range(c.replicas * c.microbatches)
        ]
        for stage in range(c.stages)
    ]


def any_rule(rng: random.Random) -> Rule:
    """Forwards that go first are not held back for a gradient, too: that would be time lost."""
    share, first = (0.0, 0.5, 1.0), rng.random() < 0.3
    forward = 1.0 if first else rng.choice(share)
    return Rule(forward, rng.choice(share), first, rng.choice([1, 3, 99]))


def made_of(rng: random.Random, workers: Workers, c: ReplicaConditions) -> tuple[Runs, Made]:
    runs, turns = any_runs(rng, c), list(range(workers.units))
    rng.shuffle(turns)
    rules = [any_rule(rng) for _ in range(workers.workers)]
    made = list_schedule(workers, runs, rules, turns)
    assert made is not None
    return runs, made


@settings(max_examples=150)
@given(seeds)
def test_every_order_runs_in_the_memory_that_there_is(seed):
    rng = random.Random(seed)
    c = any_job(rng, narrow=rng.random() < 0.5)
    workers = Workers(c)
    runs, made = made_of(rng, workers, c)
    schedule = workers.schedule(made, "test")
    check(lower(schedule), c.activation_budget)
    for stage, line in enumerate(runs):
        for unit, worker in enumerate(line):
            home, microbatch = divmod(unit, c.microbatches)
            assert schedule.routes.worker(stage, microbatch, home) == worker


@given(seeds)
def test_its_times_are_the_simulators(seed):
    rng = random.Random(seed)
    c = any_job(rng, narrow=False)
    workers = Workers(c)
    _, made = made_of(rng, workers, c)
    timeline = simulate(lower(workers.schedule(made, "test")), c)
    assert timeline.pipeline == pytest.approx(made.seconds, rel=1e-9)
    assert len(made.ends) == c.workers


@pytest.mark.parametrize(("forwards", "slots"), [(3, 108), (6, 208)])
def test_a_slow_port_untreated(forwards, slots):
    """4 x 4 x 16, halves, 1F1B's memory: 1.89 and 3.65 times healthy 1F1B, which takes 57 slots."""
    ones = (1.0,) * 4
    pipeline = Conditions(16, ones, ones, ones, message_bytes=1.0, activation_budget=(4, 3, 2, 1))
    c = ReplicaConditions(pipeline, 4, ports={1: 1 / forwards})
    workers = Workers(c)
    runs = [[unit // 16 * 4 + stage for unit in range(64)] for stage in range(4)]
    turns = sorted(range(64), key=lambda unit: unit % 16)
    made = list_schedule(workers, runs, [Rule()] * 16, turns)
    assert made.seconds == slots
    assert simulate(lower(workers.schedule(made, "test")), c).makespan == slots


RULES = (Rule(forward=0.0, forward_first=True), Rule(forward=0.0, weight=0.0))


def test_no_worker_waits_for_a_gradient_that_is_there() -> None:
    """Sums of equal times differ in their last bits from one route to another."""
    for seed in range(500):
        rng = random.Random(seed)
        stages, count, replicas = rng.randint(3, 4), rng.randint(2, 3), rng.randint(2, 3)
        each = (rng.choice((0.009, 0.1, 0.7)),) * stages
        budget = (rng.choice((1.0, 2.0, 9.0)),) * stages
        slow = {rng.randrange(stages * replicas): rng.choice((2.0, 3.0, 1.1))}
        pipeline = Conditions(count, each, each, each, activation_budget=budget)
        workers = Workers(ReplicaConditions(pipeline, replicas, slow=slow))
        runs = [
            [rng.randrange(replicas) * stages + stage for _ in range(workers.units)]
            for stage in range(stages)
        ]
        rules = [rng.choice(RULES) for _ in range(workers.workers)]
        made = list_schedule(workers, runs, rules, workers.turns)
        assert made is not None
        ran = sum(map(len, made.order))
        assert ran == 3 * stages * workers.units, f"seed {seed}"
