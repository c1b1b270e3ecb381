"""Rates of ports that a machine keeps: lowered until a ring takes what its own model predicts.

Where processes compete for cores, all-reduces take longer than their ports ask for, each by another
factor, and ratios between them mean little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_adaptra.bench.allreduce_options import RING, AllReduceOptions

KEPT = 0.05  # of the model's time that a ring may be off
TRIES = 3  # rates, each half of the one before

Row = dict[str, Any]


@dataclass(frozen=True)
class Rate:
    """What a measurement was asked for, and made with, both in words.

    `ring_off`: how much longer than predicted the ring took, of that, at most over all cases; less
    than 0 where it took less. None where nothing was predicted.
    """

    asked: str
    used: str
    ring_off: float | None

    @property
    def kept(self) -> bool:
        """Whether the ring took what its model predicts."""
        return self.ring_off is None or abs(self.ring_off) <= KEPT


def at_kept_rate(
    options: AllReduceOptions,
    measure: Callable[[AllReduceOptions], Sequence[Row]],
    show: Callable[[AllReduceOptions, Rate], object],
) -> tuple[Sequence[Row], Rate]:
    """The rows of the highest rates that the machine keeps, and these.

    Those of the last try where it keeps none.

    Args:
        options: what to measure, at the rates to begin with.
        measure: gives the rows of what it is asked for.
        show: is called with what is measured next, and the rates that were not kept before.
    """
    tried = options
    for left in reversed(range(TRIES)):
        rows = measure(tried)
        rate = Rate(options.where, tried.where, ring_off(rows))
        if rate.kept or not left:
            break
        tried = tried.at_half_rate()
        show(tried, rate)
    return rows, rate


def ring_off(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """What the ring took beside its prediction, as a part of that: of the case where it is most.

    `rows`: of any algorithms, sizes and lateness; None where no ring among them has a prediction.
    """
    parts = [
        row["ms_after_arrival"] / row["predicted_ms"] - 1
        for row in rows
        if row["algorithm"] == RING and row["predicted_ms"]
    ]
    return max(parts, key=math.fabs, default=None)
