"""Made-up runs of data-parallel replicas: what the microbatches of each took, by iteration."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

SECONDS = 0.025  # of a microbatch on a replica that is well
COUNT = 8  # microbatches of a replica
Samples = Mapping[int, tuple[float, int]]
Slow = Callable[[int], Mapping[int, float]]  # by iteration: by replica, how many times as long


class Run(NamedTuple):
    """`rows`: one per iteration. `changes`: iterations from which on others are slow for good."""

    kind: str
    rows: Sequence[Samples]
    changes: Sequence[int]


def iteration(
    rng: random.Random,
    slow: Mapping[int, float],
    counts: Sequence[int],
    sigma: float = 0.03,
    spikes: float = 0.0,
    outside: float = 0.0,
    fill: float = 0.0,
) -> dict[int, tuple[float, int]]:
    """What replicas that run `counts` microbatches take; those in `slow` so many times as long.

    `sigma`: of the lognormal noise of an iteration. `spikes`: share of a replica's iterations that
    take 2 to 6 times as long. `outside`, `fill`: see ReplicaSpeeds.
    """
    samples = {}
    for replica, count in enumerate(counts):
        times = slow.get(replica, 1.0) * rng.lognormvariate(0.0, sigma)
        times *= rng.uniform(2, 6) if rng.random() < spikes else 1.0
        samples[replica] = outside + SECONDS * times * (count + fill), count
    return samples


def made(kind: str, seed: int, replicas: int = 4, iterations: int = 300) -> Run:
    """A run of one of KINDS; the same seed gives the same run."""
    rng = random.Random(f"{kind} {seed}")
    slow, changes, noise = KINDS[kind](rng, replicas, iterations)
    rows = [iteration(rng, slow(i), [COUNT] * replicas, **noise) for i in range(iterations)]
    return Run(kind, rows, changes)


Kind = Callable[[random.Random, int, int], tuple[Slow, list[int], dict[str, float]]]


def _steady(rng: random.Random, replicas: int, iterations: int):
    return lambda i: {}, [], {}


def _jitter(rng: random.Random, replicas: int, iterations: int):
    return lambda i: {}, [], {"sigma": 0.12}


def _spikes(rng: random.Random, replicas: int, iterations: int):
    return lambda i: {}, [], {"spikes": 0.03}


def _step(rng: random.Random, replicas: int, iterations: int):
    """One replica is slow for a third of the time."""
    who, factor = rng.randrange(replicas), rng.uniform(1.4, 3)
    first = rng.randrange(iterations // 5, iterations // 3)
    last = first + iterations // 3
    return lambda i: {who: factor} if first <= i < last else {}, [first, last], {}


def _drift(rng: random.Random, replicas: int, iterations: int):
    """One replica gets slower and slower, and stays so."""
    who, factor = rng.randrange(replicas), rng.uniform(1.5, 3)
    first, takes = rng.randrange(iterations // 5, iterations // 3), rng.randrange(40, 150)

    def slow(i: int) -> dict[int, float]:
        return {who: 1 + (factor - 1) * min(1.0, max(0, i - first) / takes)}

    return slow, [first], {}


def _rotating(rng: random.Random, replicas: int, iterations: int):
    """Another replica is slow in each iteration, or in every few."""
    each, factor = rng.randrange(1, 4), rng.uniform(1.5, 3)
    return lambda i: {i // each % replicas: factor}, [], {}


KINDS: dict[str, Kind] = {
    "steady": _steady,
    "jitter": _jitter,
    "spikes": _spikes,
    "step": _step,
    "drift": _drift,
    "rotating": _rotating,
}
