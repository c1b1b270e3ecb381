"""Made-up arrivals of a group of ranks, as its members see them."""

from __future__ import annotations

import random
from collections.abc import Mapping

from megatron_adaptra.measure.arrivals import Pair


def messages(
    ranks: int,
    late: Mapping[int, float],
    *,
    delay: float = 0.3e-3,
    slow: Mapping[Pair, float] | None = None,
    rng: random.Random | None = None,
    noise: float = 0.0,
) -> dict[int, dict[int, float]]:
    """By receiver and source, seconds from the receiver's own arrival.

    `late`: seconds, by rank. `slow`: seconds beyond `delay`. `noise`: standard deviation of
    arrivals, in seconds; delays vary by a fifth where there is some.
    """
    rng = rng or random.Random(0)
    came = [late.get(rank, 0.0) + abs(rng.gauss(0.0, noise)) for rank in range(ranks)]
    seen: dict[int, dict[int, float]] = {}
    for target in range(ranks):
        seen[target] = {}
        for source in range(ranks):
            if source != target:
                takes = delay * (rng.lognormvariate(0, 0.2) if noise else 1.0)
                takes += (slow or {}).get((source, target), 0.0)
                seen[target][source] = came[source] + takes - came[target]
    return seen
