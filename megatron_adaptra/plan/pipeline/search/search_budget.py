"""The budget of a search: counted in ops looked at, or in seconds if the user sets a limit."""

from __future__ import annotations

import math
import time

# At about 0.3 us per op looked at: some 0.1 s for 8 stages x 24 microbatches, 0.8 s for 16 x 128,
# 7 s for 64 x 512, where the bound is not reached before.
LEAST, BASE, SIZE, GROWTH, MOST = 3e5, 4e5, 576, 0.76, 9e6
MORE = 2.4e6  # where microbatches may be recomputed there are far more orders to look at


def end_of(time_limit: float | None) -> float:
    """Return the moment at which `time_limit` seconds from now are over; infinity for None."""
    return math.inf if time_limit is None else time.monotonic() + time_limit


def left(end: float) -> float | None:
    """Return the seconds until the moment `end`, at least 0; None if it is infinite."""
    return None if math.isinf(end) else max(0.0, end - time.monotonic())


def since(moment: float) -> float:
    """Return the seconds since a `moment` that `end_of` gave."""
    return time.monotonic() - moment


def worked(before: float) -> float:
    """Return the seconds that this thread has computed, less those `before`; waits do not count."""
    return time.thread_time() - before


def late(end: float) -> bool:
    """Return whether the moment `end` has come."""
    return end < math.inf and time.monotonic() >= end


class SearchBudget:
    """A search budget counts ops looked at, or seconds. Counting ops gives all machines one plan.

    `ops`: the size of the job. `time_limit`: seconds, or None to count ops. `recompute`: whether
    there are orders with recompute to look at, too.
    """

    def __init__(self, ops: int, time_limit: float | None = None, recompute: bool = False) -> None:
        self.visits = 0.0
        self.limit: float = min(max(LEAST, BASE * (ops / SIZE) ** GROWTH), MOST)
        if recompute:
            self.limit += MORE * min(1.0, ops / SIZE)
        self.begun = time.monotonic()
        self.time_limit = time_limit
        self.end = end_of(time_limit)

    def spend(self, visits: int) -> None:
        """Count so many ops, `visits`, as looked at."""
        self.visits += visits

    @property
    def spent(self) -> float:
        """The share of the budget that is used up; 1 or more once the search has to end."""
        if self.time_limit is None:
            return self.visits / self.limit
        elapsed = time.monotonic() - self.begun
        return elapsed / self.time_limit if self.time_limit > 0 else 1.0
