"""Garbage collections of ranks that hold up iterations one by one.

Each rank's collector runs when that rank has made enough objects, so that all others wait for one
rank after another. Where all collect in the same iterations they wait once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from megatron_adaptra.diagnose.watch import Sight

WINDOW = 16  # iterations that are looked at together
SHARE, OVER = 0.05, 0.02  # of the window's time, from which on it is a finding, or none any more
LEAST = 4  # iterations with such collections: fewer may be chance, and imports at the start
SHORT = 0.01  # of an iteration; shorter collections, of young objects, hold nothing up
FULL = 0.5  # of a rank's longest in the window, from which on a collection is one of all objects
ALIKE = 0.1  # of the iteration's longest, from which on it is as much worth waiting for


class _Row(NamedTuple):
    iteration: int
    took: float
    collecting: Mapping[int, float]


class GarbageWatch:
    """A watch follows the garbage collections of workers.

    `busy`: a Sight while some hold up iterations in which others do not collect, with the mean
    seconds per iteration; else None. `over`: a Sight in the iteration in which that has ended; else
    None. `workers`: those that did so.
    """

    def __init__(self) -> None:
        self.busy: Sight | None = None
        self.over: Sight | None = None
        self.workers: list[int] = []
        self._rows: deque[_Row] = deque(maxlen=WINDOW)

    def update(self, iteration: int, took: float, collecting: Mapping[int, float]) -> None:
        """Take an `iteration` that `took` so many seconds; `collecting`: CPU seconds, by worker."""
        self.over = None
        self._rows.append(_Row(iteration, took, collecting))
        typical = median(row.took for row in self._rows)
        longest: dict[int, float] = {}
        for row in self._rows:
            for worker, seconds in row.collecting.items():
                longest[worker] = max(seconds, longest.get(worker, 0.0))
        alone = {row.iteration: _alone(row, typical, longest) for row in self._rows}
        costs = {i: max(each.values()) for i, each in alone.items() if each}
        # The window as if it were full: a start is short, and has more collections.
        share = sum(costs.values()) / (WINDOW * typical) if typical > 0 else 0.0
        if self.busy is None and (share < SHARE or len(costs) < LEAST):
            return
        if self.busy is not None and share < OVER:
            until = max(costs, default=self._rows[0].iteration - 1) + 1
            self.busy, self.over = None, Sight(0.0, 0.0, until, 1, 1)
            return
        known = set() if self.busy is None else set(self.workers)
        self.workers = sorted(known.union(*alone.values()))
        since = min(costs) if self.busy is None else self.busy.since
        count = iteration - min(costs) + 1
        self.busy = Sight(sum(costs.values()) / count, 0.0, since, len(costs), count)


def _alone(row: _Row, typical: float, longest: Mapping[int, float]) -> dict[int, float]:
    """Return the long collections of an iteration, by worker; none where all have collected.

    `typical`: seconds of an iteration. `longest`: seconds, by worker, of all rows.
    """
    most = max(row.collecting.values(), default=0.0)
    if most < SHORT * typical:
        return {}
    found = {
        worker: seconds
        for worker, seconds in row.collecting.items()
        if seconds >= max(FULL * longest[worker], ALIKE * most)
    }
    return found if len(found) < len(row.collecting) else {}
