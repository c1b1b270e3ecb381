"""When the ranks of a group came to their all-reduce, and what a message between two takes.

Each rank sends every other one a few bytes as soon as its first gradients are ready. A receiver
knows how much later than itself a message came, by its own clock. Of two ranks that is, both ways,
`m_j[i] = a_i - a_j + d_ij` and `m_i[j] = a_j - a_i + d_ji`: half the difference is the lateness of
one against the other, with half of what the delays differ by; in the sum lateness is gone. No
clocks are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from megatron_adaptra.measure.middle import Floats, medians

Pair = tuple[int, int]  # source and target of a message
Seen = Mapping[int, Mapping[int, float]]  # by receiver and source, seconds after its own arrival
LONGEST = 3600.0  # seconds: what is more is nonsense
_ROUNDS = 4  # after which moments fit each other
_USUAL = 3  # times the median doubt, up to which it is noise


class Arrivals(NamedTuple):
    """Seconds of one iteration.

    `late`: by rank, its lateness; of the first ones 0. `doubts`: by rank, by how much that may be
    wrong. Ranks of which nothing is known are in neither. `delays`: [source, target], nan where not
    known. `round_trips`: [one, other], both ways the same.
    """

    late: dict[int, float]
    doubts: dict[int, float]
    delays: Floats
    round_trips: Floats


def by_path(seen: Seen, ranks: int) -> Floats:
    """[source, target], nan where no message came; what ranks from `ranks` on saw is left out."""
    came = np.full((ranks, ranks), np.nan)
    inside = range(ranks)
    for target, row in seen.items():
        if target in inside:
            sources = [source for source in row if source in inside and source != target]
            came[sources, target] = [row[source] for source in sources]
    return came


def arrivals(came: Floats, least: Floats, known: Floats | None = None) -> Arrivals:
    """What a group has seen.

    Args:
        came: [source, target], seconds as in Seen, or nan. Of ranks whose messages did not come
            both ways nothing is known, unless the delay of one way is. Seconds that cannot be are
            left out.
        least: [one, other], of round trips the seconds that they have taken when the path was well,
            or inf. What a round trip takes more may be of one way alone, so that so much of a
            lateness is in doubt, and is not counted.
        known: delays, [source, target] or nan, for ranks that have received nothing.
    """
    there = np.where(np.abs(came) <= LONGEST, came, np.nan)
    back = there.T
    trips = there + back
    doubts = np.maximum(0.0, trips - least) / 2
    apart = _less((there - back) / 2, doubts)  # [one, other]: how much later than that one
    if known is not None:
        one_way = np.where(np.isnan(back), there - known, np.nan)
        for way in (one_way, -one_way.T):
            doubts[~np.isnan(way)] = 0.0
            apart = np.where(np.isnan(way), apart, way)
    moments = _moments(apart, doubts)
    ranks = np.flatnonzero(~np.isnan(moments)).tolist()
    return Arrivals(
        after_the_first({rank: moments[rank].item() for rank in ranks}),
        dict(zip(ranks, medians(doubts)[ranks].tolist(), strict=True)),
        np.maximum(0.0, there - moments[:, None] + moments),
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


def _moments(apart: Floats, doubts: Floats) -> Floats:
    """When each rank came, by what each is later than others; nan where that is not known.

    That differs where a path is slow. A median over the others finds what most of them know, and
    those far more in doubt than usual are left out, where there are others.
    """
    known = ~np.isnan(apart)
    order = np.sort(doubts[known])
    sure = known & (doubts <= _USUAL * order[(len(order) - 1) // 2]) if len(order) else known
    sure = np.where(sure.any(axis=1, keepdims=True), sure, known)
    lone = np.zeros((len(apart), 1))  # as late as itself
    moments = medians(np.hstack([np.where(sure, apart, np.nan), lone]))
    moments[~known.any(axis=1)] = np.nan
    rows = [(rank, np.flatnonzero(row)) for rank, row in enumerate(sure) if row.any()]
    for _ in range(_ROUNDS):
        for rank, others in rows:
            row = moments[others] + apart[rank, others]
            row.sort()
            moments[rank] = (row[(len(row) - 1) // 2] + row[len(row) // 2]) / 2
    return moments


def _less(late: Floats, doubts: Floats) -> Floats:
    return np.copysign(np.maximum(0.0, np.abs(late) - doubts), late)
