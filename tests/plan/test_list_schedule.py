"""The list scheduler for replicas runs every op, whatever the routes and the rounding of times."""

from __future__ import annotations

import random

from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.plan.replicas.list_schedule import Rule, Workers, list_schedule

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
