"""What judging an iteration costs the leader of a data-parallel group: `benchmarks/arrivals.py`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from common import main

from megatron_adaptra.measure.all_reduce_estimate import AllReduceEstimate
from megatron_adaptra.measure.arrivals import Seen

SIZES = (4, 8, 16, 32, 64, 128)
SEED = 20261128
NBYTES = 10**9
FIRST = 6  # iterations, in which paths are measured


def rows(runs: int) -> list[dict[str, Any]]:
    return [judging(ranks, runs) for ranks in SIZES]


def judging(ranks: int, runs: int) -> dict[str, Any]:
    """CPU time once all ranks have reported an iteration, and of the figures for a plan."""
    rng, estimate = random.Random(SEED), AllReduceEstimate(ranks)
    between = dict.fromkeys(range(ranks), 1.0)
    for _ in range(FIRST):
        rates = {
            (a, b): 1e9 * rng.uniform(1.0, 1.02)
            for a in range(ranks)
            for b in range(ranks)
            if a != b
        }
        estimate.update(arrived(ranks, rng), rates, NBYTES, between)
        estimate.accept()
    iterations = [arrived(ranks, rng) for _ in range(runs)]
    return {
        "ranks": ranks,
        "iteration ms": median(
            cpu_ms(lambda seen=seen: estimate.update(seen, {}, NBYTES, between))
            for seen in iterations
        ),
        "figures ms": median(
            cpu_ms(lambda: estimate.figures(NBYTES, 1.0, 0.5)) for _ in iterations
        ),
    }


def cpu_ms(function: Callable[[], object]) -> float:
    began = time.process_time()
    function()
    return 1e3 * (time.process_time() - began)


def arrived(ranks: int, rng: random.Random) -> Seen:
    """A healthy iteration: ranks come within a millisecond, messages take about two."""
    came = [rng.uniform(0, 1e-3) for _ in range(ranks)]
    return {
        target: {
            source: came[source] - came[target] + rng.uniform(2.0e-3, 2.1e-3)
            for source in range(ranks)
            if source != target
        }
        for target in range(ranks)
    }


if __name__ == "__main__":
    main("What judging an iteration costs, CPU time", rows)
