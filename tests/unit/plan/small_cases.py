"""Small random jobs and their optima, to hold other planners against.

small_optima.json has the optima of the first 200, proven by `python benchmarks/exact.py`.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

from megatron_adaptra.ir.conditions import Conditions, LinkState

OPTIMA = Path(__file__).with_name("small_optima.json")


def small_case(seed: int) -> Conditions:
    """2 to 4 stages, 3 to 8 microbatches, every link another delay of up to 6 forwards.

    Times are in hundredths, stages are equal in half of the jobs. A third has no limit of memory,
    a half may not split a backward, and a quarter may recompute.
    """
    rng = random.Random(seed)
    stages, count = rng.randint(2, 4), rng.randint(3, 8)
    equal = rng.random() < 0.5

    def seconds(least: float, most: float) -> tuple[float, ...]:
        draws = [round(rng.uniform(least, most), 2) for _ in range(stages)]
        return tuple(draws[:1] * stages if equal else draws)

    forward, backward_input, backward_weight = seconds(0.5, 2), seconds(0.5, 2), seconds(0.3, 1.5)
    mean = sum(forward) / stages
    links = {
        way: LinkState(round(mean * rng.choice((0, 0, rng.uniform(0, 2), rng.uniform(2, 6))), 2))
        for i in range(stages - 1)
        for way in ((i, i + 1), (i + 1, i))
    }
    budget = rng.choice((math.inf, rng.randint(1, count), rng.randint(2, 2 * count) / 2))
    return Conditions(
        count,
        forward,
        backward_input,
        backward_weight,
        links,
        activation_budget=(budget,) * stages,
        split=rng.random() < 0.5,
        recompute=rng.random() < 0.25,
    )
