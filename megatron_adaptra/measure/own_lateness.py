"""The part of a rank's lateness that is its own, without what the last all-reduce has caused.

A rank for which an all-reduce ends later comes later to the next one, and under another plan it
does not. So its own lateness is the time that it takes longer than others between two all-reduces.
But where ranks wait for each other in between, for the mean of a loss, that time includes the wait,
and their own lateness is what shows at the next arrival. Both follow from the same seconds; the one
that stays the same when all-reduces end at other times shows whether a program has such waits.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_adaptra.measure.arrivals import after_the_first


class OwnLateness:
    """A filter finds each rank's own lateness.

    `free`: True where ranks seem not to wait for each other between all-reduces.
    """

    def __init__(self) -> None:
        self.free = False
        self._evidence = 0.0  # seconds; above 0 where ranks are free
        # Of the last iteration, by rank: its lateness, if certain, and its seconds in between.
        self._last: tuple[dict[int, float], dict[int, float]] = ({}, {})

    def of(
        self,
        came: Mapping[int, float],
        between: Mapping[int, float],
        matters: float,
        doubts: Mapping[int, float],
    ) -> dict[int, float]:
        """Return, by rank, its own seconds after the first ranks in one iteration.

        Args:
            came: by rank, the seconds that it came after the first ones.
            between: by rank, the seconds from the end of the last all-reduce there to its arrival.
            matters: seconds; changes by less are chance.
            doubts: by rank, the seconds by which `came` may be wrong, as where messages waited for
                a core. A rank with more than `matters` is not used to find out who is `free`.
        """
        took = after_the_first({rank: between[rank] for rank in came if rank in between})
        sure = {rank: late for rank, late in came.items() if doubts.get(rank, 0.0) <= matters}
        self._compare(sure, took, matters)
        self._last = sure, took
        if self.free:
            return {rank: took.get(rank, late) for rank, late in came.items()}
        return {rank: min(late, took.get(rank, late)) for rank, late in came.items()}

    def _compare(
        self, came: Mapping[int, float], took: Mapping[int, float], matters: float
    ) -> None:
        """Update `free`: a rank that gets late changes both, another all-reduce end only one."""
        came_before, took_before = self._last
        ranks = came.keys() & came_before.keys() & took.keys() & took_before.keys()
        came_by, took_by = (
            sum(x for r in ranks if (x := abs(now[r] - before[r])) > matters)
            for now, before in ((came, came_before), (took, took_before))
        )
        limit = 2 * matters  # so that one all-reduce that ends very differently shows it
        self._evidence = max(-limit, min(limit, self._evidence + came_by - took_by))
        if abs(self._evidence) > matters:  # else as before
            self.free = self._evidence > 0
