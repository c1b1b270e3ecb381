"""When the ranks of a group came to their all-reduce, and what a message between two takes.

Each rank sends every other one a few bytes as soon as its first gradients are ready. A receiver
knows how much later than itself a message came, by its own clock. Of two ranks that is, both ways,
`m_j[i] = a_i - a_j + d_ij` and `m_i[j] = a_j - a_i + d_ji`: half the difference is the lateness of
one against the other, with half of what the delays differ by; in the sum lateness is gone. No
clocks are compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median, median_low
from typing import NamedTuple

Pair = tuple[int, int]  # source and target of a message; of a round trip, the lower rank first
Seen = Mapping[int, Mapping[int, float]]  # by receiver and source, seconds after its own arrival
LONGEST = 3600.0  # seconds: what is more is nonsense
_ROUNDS = 4  # after which moments fit each other
_USUAL = 3  # times the median doubt, up to which it is noise


class Arrivals(NamedTuple):
    """Seconds of one iteration.

    `late`: by rank, its lateness; of the first ones 0. `doubts`: by rank, by how much that may be
    wrong. `delays`: by source and target. `round_trips`: by two ranks, the lower one first.
    """

    late: dict[int, float]
    doubts: dict[int, float]
    delays: dict[Pair, float]
    round_trips: dict[Pair, float]


def arrivals(
    seen: Seen, least: Mapping[Pair, float], known: Mapping[Pair, float] | None = None
) -> Arrivals:
    """What a group has seen.

    Args:
        seen: of ranks whose messages did not come both ways nothing is known, unless the delay of
            one way is. Seconds that cannot be are left out.
        least: of round trips, the seconds that they have taken when the path was well. What a
            round trip takes more may be of one way alone, so that so much of a lateness is in
            doubt, and is not counted.
        known: delays by source and target, for ranks that have received nothing.
    """
    came = {
        (source, target): seconds
        for target, row in seen.items()
        for source, seconds in row.items()
        if source != target and abs(seconds) <= LONGEST
    }
    trips: dict[Pair, float] = {}
    # By rank and other rank: how much in doubt, the other one, how much later than that one.
    apart: dict[int, list[tuple[float, int, float]]] = {}
    for (a, b), there in came.items():
        back = came.get((b, a))
        if back is not None and a < b:
            trips[a, b] = there + back
            doubt = max(0.0, there + back - least.get((a, b), math.inf)) / 2
            late = _less((there - back) / 2, doubt)
        elif back is None and known is not None and (a, b) in known:
            doubt, late = 0.0, there - known[a, b]
        else:
            continue
        apart.setdefault(a, []).append((doubt, b, late))
        apart.setdefault(b, []).append((doubt, a, -late))
    moments = _moments(apart)
    return Arrivals(
        after_the_first(moments),
        {rank: median(doubt for doubt, *_ in row) for rank, row in apart.items()},
        {
            (a, b): max(0.0, seconds - moments[a] + moments[b])
            for (a, b), seconds in came.items()
            if a in moments and b in moments
        },
        trips,
    )


def after_the_first(moments: Mapping[int, float]) -> dict[int, float]:
    """By rank, how many seconds its moment is after those of the first ranks; of these 0.

    `moments`: by rank, seconds by any clock.
    """
    # Where a rank in four is early by chance, the others are not late.
    order = sorted(moments.values())
    first = order[(len(order) - 1) // 4] if order else 0.0
    return {rank: max(0.0, moment - first) for rank, moment in sorted(moments.items())}


def _moments(apart: Mapping[int, Sequence[tuple[float, int, float]]]) -> dict[int, float]:
    """When each rank came, by what each is later than others.

    That differs where a path is slow. A median over the others finds what most of them know, and
    those far more in doubt than usual are left out, where there are others.
    """
    doubts = [doubt for row in apart.values() for doubt, *_ in row]
    usual = _USUAL * median_low(doubts) if doubts else 0.0
    sure = {rank: [one for one in row if one[0] <= usual] or row for rank, row in apart.items()}
    moments = {rank: median([0.0, *(late for *_, late in row)]) for rank, row in sure.items()}
    for _ in range(_ROUNDS):
        for rank, row in sure.items():
            moments[rank] = median(moments[other] + late for _, other, late in row)
    return moments


def _less(late: float, doubt: float) -> float:
    return math.copysign(max(0.0, abs(late) - doubt), late)
