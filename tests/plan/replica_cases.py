"""Small random jobs of several replicas, their plans, and their optima.

Figures of docs/evidence/planner.md are made by

    python tests/plan/replica_cases.py [FIRST SEED] [CASES] [OPS PER PLAN]
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

from replica_exact import ReplicaOptimum, solve_replicas

from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.plan.reroute import OPS, ReplicaPlan, plan_replicas


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


class Case(NamedTuple):
    """A small job by its seed, its plan and its optimum."""

    seed: int
    plan: ReplicaPlan
    optimum: ReplicaOptimum


def cases(first: int, count: int, ops: int = OPS, seconds: float = 20.0) -> Iterator[Case]:
    """The jobs with so many seeds from the `first` on.

    Args:
        first: seed.
        count: of them.
        ops: that the planner may schedule for each.
        seconds: that the solver may take for each, by its own count.
    """
    for seed in range(first, first + count):
        c = small_job(seed)
        plan = plan_replicas(c, ops=ops)
        yield Case(seed, plan, solve_replicas(c, plan.schedule, seconds))


def main(first: int = 0, count: int = 200, ops: int = OPS) -> None:
    """Print one line per job, and what they come to."""
    solved, optimal, tight, gaps = 0, 0, 0, []
    began = time.perf_counter()
    for seed, plan, best in cases(first, count, ops):
        took, began = time.perf_counter() - began, time.perf_counter()
        gap = plan.predicted / best.bound - 1
        note = "" if best.proven else "  not proven"
        note += "  BOUND ABOVE THE OPTIMUM" if plan.lower_bound > best.seconds + 1e-6 else ""
        print(
            f"{seed}: plan {plan.predicted:g}, optimum {best.seconds:g},"
            f" bound {plan.lower_bound:g}, {took:.1f} s{note}",
            flush=True,
        )
        if best.proven:
            solved += 1
            optimal += gap < 1e-6
            tight += plan.lower_bound > best.seconds - 1e-6
            gaps.append(gap)
    print(
        f"seeds {first} to {first + count - 1}: {solved} of {count} optima proven; the plan has"
        f" {optimal} of them, above: mean {sum(gaps) / len(gaps):.2%}, worst {max(gaps):.1%};"
        f" the bound equals {tight}"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
