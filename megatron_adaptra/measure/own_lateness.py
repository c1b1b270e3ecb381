"""What of a rank's lateness is its own, and what the last all-reduce has left to it.

A rank for which an all-reduce ends later comes later to the next one, and under another plan it
does not. So its own is what it takes more than others between two of them. But where ranks wait for
each other in between, for the mean of a loss, what they take includes that wait, and their own
lateness is what shows at the next arrival. Both follow from the same seconds; which of them stays
the same when all-reduces end otherwise shows what a program does.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_adaptra.measure.arrivals import after_the_first


class OwnLateness:
    """Of one group's ranks. `free`: no wait in between is known of."""

    def __init__(self) -> None:
        self.free = False
        self._evidence = 0.0  # seconds; for free ones above 0
        # Of the last iteration, by what is known for sure.
        self._last: tuple[dict[int, float], dict[int, float]] = ({}, {})

    def of(
        self,
        came: Mapping[int, float],
        between: Mapping[int, float],
        matters: float,
        doubts: Mapping[int, float],
    ) -> dict[int, float]:
        """By rank, its own seconds after the first ranks; one iteration.

        Args:
            came: how much later than the first ones each rank came.
            between: seconds from the end of the last all-reduce there to its arrival.
            matters: seconds; what changes by less is chance.
            doubts: by rank, the seconds by which `came` may be wrong, as where messages waited for
                a core. More than matter, and it shows nothing of what a program does.
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
        """A rank that gets late changes both; an all-reduce that ends otherwise, one of them."""
        came_before, took_before = self._last
        ranks = came.keys() & came_before.keys() & took.keys() & took_before.keys()
        came_by, took_by = (
            sum(x for r in ranks if (x := abs(now[r] - before[r])) > matters)
            for now, before in ((came, came_before), (took, took_before))
        )
        limit = 2 * matters  # so that one all-reduce that ends quite otherwise shows it
        self._evidence = max(-limit, min(limit, self._evidence + came_by - took_by))
        if abs(self._evidence) > matters:  # else as before
            self.free = self._evidence > 0
