"""Small random jobs of several replicas and their optima, to hold plans and bounds against.

The optima are proven by `python benchmarks/replica_exact.py`, which takes further seeds, too.
"""

from __future__ import annotations

import random

from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.replicas import ReplicaConditions

OPTIMA = (  # seconds, of the seeds from 0 on
    19, 22, 12, 34, 36, 32, 54, 29, 32, 26, 32, 26, 21, 32, 45, 36, 54, 26, 42, 39, 46, 89, 18, 21,
    19, 18, 49, 44, 49, 44, 24, 35, 18, 18, 22, 15, 14, 24, 23, 67, 19, 20, 43, 30, 15, 39, 43, 35,
    34, 20,
)  # fmt: skip


def small_job(seed: int) -> ReplicaConditions:
    """2 or 3 replicas, 2 or 3 stages, 1 to 3 microbatches each, at most 6 in all.

    Times are whole. A quarter of the workers is slow, one is dead in a third of the jobs,
    paths have delays in a third, and are thin in a quarter of the jobs, ports in an eighth.
    """
    rng = random.Random(seed)
    replicas, stages = rng.randint(2, 3), rng.randint(2, 3)
    count = rng.randint(1, 3 if replicas == 2 else 2)
    split, equal = rng.random() < 0.6, rng.random() < 0.5

    def seconds(most: int) -> tuple[float, ...]:
        draws = [float(rng.randint(1, most)) for _ in range(stages)]
        return tuple(draws[:1] * stages if equal else draws)

    workers = range(replicas * stages)
    failed = frozenset(rng.sample(workers, 1) if rng.random() < 1 / 3 else ())
    slow = {w: float(rng.choice((2, 2, 3))) for w in workers if rng.random() < 0.25}
    adjacent = [(a, b) for a in workers for b in workers if abs(a % stages - b % stages) == 1]
    delayed, thin, port = rng.random() < 1 / 3, rng.random() < 1 / 4, rng.random() < 1 / 8
    paths = {}
    for way in adjacent:
        delay = float(rng.choice((0, 0, 1, 3))) if delayed else 0.0
        wire = rng.choice((0, 0, 1, 3)) if thin else 0
        if delay or wire:
            paths[way] = LinkState(delay, 1 / wire if wire else float("inf"))
    ports = {w: 1 / rng.randint(1, 3) for w in workers if port and rng.random() < 0.3}
    budget = rng.choice((1, 1.5, 2, 2.5, 3, float("inf")))
    pipeline = Conditions(
        count,
        seconds(3),
        seconds(3),
        seconds(3),
        message_bytes=1.0,
        split=split,
        activation_budget=(budget,) * stages,
    )
    return ReplicaConditions(pipeline, replicas, failed, slow, paths, ports)
