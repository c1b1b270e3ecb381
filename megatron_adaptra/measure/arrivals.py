"""The arrivals of a group's ranks at their all-reduce, and the delays of messages between them.

Each rank sends every other one a few bytes as soon as its first gradients are ready. A receiver
measures, by its own clock, how much later than itself a message came. Ranks i and j, which arrive
at `a_i` and `a_j`, measure `m_j[i] = a_i - a_j + d_ij` and `m_i[j] = a_j - a_i + d_ji`, where `d`
are the delays of their messages. Half the difference of the two is the lateness of i against j,
plus half of what the delays differ by; in the sum, lateness cancels. No clocks are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from megatron_adaptra.measure.statistics import Floats, medians

Pair = tuple[int, int]  # source and target of a message
Seen = Mapping[int, Mapping[int, float]]  # by receiver and source, seconds after its own arrival
LONGEST = 3600.0  # seconds; more is nonsense
_ROUNDS = 4  # of refinement, after which moments fit each other
_USUAL = 3  # times the median doubt, up to which it is noise


class Arrivals(NamedTuple):
    """An Arrivals holds what the messages of one iteration have shown, in seconds.

    `late`: by rank, its lateness; 0 for the first ranks. `doubts`: by rank, by how much that may be
    wrong. Both leave out ranks of which nothing is known. `delays`: [source, target], nan where not
    known. `round_trips`: [one, other], both ways the same.
    """

    late: dict[int, float]
    doubts: dict[int, float]
    delays: Floats
    round_trips: Floats


def by_path(seen: Seen, ranks: int) -> Floats:
    """Return `seen` of ranks 0 to `ranks` - 1 as [source, target]; nan where no message came."""
    came = np.full((ranks, ranks), np.nan)
    inside = range(ranks)
    for target, row in seen.items():
        if target in inside:
            sources = [source for source in row if source in inside and source != target]
            came[sources, target] = [row[source] for source in sources]
    return came


def arrivals(came: Floats, least: Floats, known: Floats | None = None) -> Arrivals:
    """Compute the lateness of ranks and the delays of their messages in one iteration.

    Args:
        came: [source, target], seconds as in Seen, or nan; impossible ones are left out. Two ranks
            can be compared if messages came both ways, or one way on a path of `known` delay.
        least: [one, other], seconds that a round trip took while its path was well, or inf. What
            a round trip takes beyond that may be due to one way alone: half of it is the doubt
            about a lateness, which is reduced by that much.
        known: delays, [source, target] or nan, for ranks that have received nothing.
    """
    there = np.where(np.abs(came) <= LONGEST, came, np.nan)
    back = there.T
    trips = there + back
    doubts = np.maximum(0.0, trips - least) / 2
    apart = (there - back) / 2  # [one, other]: how much later than that one
    apart = np.copysign(np.maximum(0.0, np.abs(apart) - doubts), apart)
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
    """Return, by rank, the seconds from the first ranks' moment to its own; 0 for the first ranks.

    `moments`: by rank, seconds by any clock.
    """
    # The first quarter counts as first: where a rank in four is early, the others are not late.
    order = sorted(moments.values())
    first = order[(len(order) - 1) // 4] if order else 0.0
    return {rank: max(0.0, moment - first) for rank, moment in sorted(moments.items())}


def _moments(apart: Floats, doubts: Floats) -> Floats:
    """Return each rank's moment, from how much later than each other it is; nan if not known.

    On slow paths these values are wrong. The median over the other ranks follows the majority, and
    values with far more doubt than usual are left out where a rank has better ones.
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
