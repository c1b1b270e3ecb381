"""Links whose delay varies: the same job under delays drawn at random, one draw per iteration."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from random import Random

from megatron_adaptra.ir.conditions import Conditions


def draws(conditions: Conditions, count: int, seed: int) -> Iterator[Conditions]:
    """`count` times the same job, each with delays of its own; the same `seed`, the same delays.

    Every directed link has one delay for a whole iteration, lognormal with the link's delay as the
    mean and its jitter as the standard deviation: never negative, sometimes long, as delays are.
    """
    random = Random(seed)
    links = sorted(conditions.links.items())
    for _ in range(count):
        drawn = {
            way: link._replace(delay=lognormal(random, link.delay, link.jitter), jitter=0.0)
            for way, link in links
        }
        yield replace(conditions, links=drawn)


def lognormal(random: Random, mean: float, deviation: float) -> float:
    """One value of the lognormal distribution of this `mean` and standard `deviation`."""
    if mean <= 0 or deviation <= 0:
        return mean
    sigma = log_deviation(mean, deviation)
    return random.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)


def log_deviation(mean: float, deviation: float) -> float:
    """The standard deviation of the logarithm, for a lognormal of this `mean` and `deviation`."""
    return math.sqrt(2 * math.log(math.hypot(1.0, deviation / mean)))
