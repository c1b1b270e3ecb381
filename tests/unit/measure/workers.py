"""Made-up reports of the workers of one job, with noise as ops have it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from statistics import median

SECONDS = {"F": 0.010, "B": 0.020}  # of one microbatch on a healthy worker
OPS = 8  # of a kind, per iteration
BURSTS = 0.02  # share of a worker's iterations in which most of its ops take longer


def sample(
    rng: random.Random, seconds: float, count: int, sigma: float, spikes: float = 0.01
) -> float:
    """As in a report: the median of `count` ops, lognormal, a hundredth five times as long."""
    return median(
        seconds * rng.lognormvariate(0.0, sigma) * (5.0 if rng.random() < spikes else 1.0)
        for _ in range(count)
    )


def jittery(
    rng: random.Random, stages: int, replicas: int, sigma: float, bursts: float = BURSTS
) -> Iterator[Callable[[Mapping[int, float]], dict[int, dict[str, float]]]]:
    """Iterations: each makes seconds of ops by worker, for workers that take so many times as long.

    A share of each worker's iterations are `bursts`: lognormal, about 1.6 times as long.
    """
    while True:

        def iteration(slow: Mapping[int, float]) -> dict[int, dict[str, float]]:
            walls = {}
            for worker in range(stages * replicas):
                times = slow.get(worker, 1.0)
                if rng.random() < bursts:
                    times *= rng.lognormvariate(0.5, 0.5)
                walls[worker] = {
                    kind: sample(rng, times * s, OPS, sigma) for kind, s in SECONDS.items()
                }
            return walls

        yield iteration
