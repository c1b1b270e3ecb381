"""Workers and replicas beside others that do the same: which of them are slow, since when."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import ParamSpec

from megatron_adaptra.base.log import GOES_ON, log_line
from megatron_adaptra.diagnose.book import FindingBook
from megatron_adaptra.diagnose.watch import LOOKED_AT, MOST, SLOW, Sight, SlowOnes
from megatron_adaptra.measure.slow_workers import SlowWorkers

P = ParamSpec("P")


class Search:
    """A search calls what looks for something slow, until that fails: then it ends, with one line.

    `what`: is not looked for any more, in that line. `book`: of its findings.
    """

    def __init__(self, what: str, book: FindingBook) -> None:
        self._what, self._book, self._over = what, book, False

    def run(self, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call `function`, unless an earlier call has failed."""
        if self._over:
            return
        try:
            function(*args, **kwargs)
        except Exception as error:
            self._over = True
            log_line(f"{self._what} is not looked for any more, {GOES_ON}: {error!r}")
            self._book.abandon()


class BesideOthers(SlowOnes):
    """A BesideOthers finds slow ones among workers, each beside the same stage of other replicas.

    Args:
        stages, replicas: see SlowWorkers.
        leaders: whether leaders look at the same workers, and come first: one iteration more.

    `whole`: one Sight for all stages of a replica that is slow as a whole, by replica. Its stages
    do not recover in the same iteration: it stays so until all have. `whole_again`: of those that
    prove well in this iteration.
    """

    def __init__(self, stages: int, replicas: int, *, leaders: bool = True) -> None:
        super().__init__(LOOKED_AT + leaders, MOST + leaders)
        self.whole: dict[int, Sight] = {}
        self.whole_again: dict[int, Sight] = {}
        self._each = [range(first, first + stages) for first in range(0, stages * replicas, stages)]
        self._workers = SlowWorkers(stages, replicas)
        self._groups = [range(s, stages * replicas, stages) for s in range(stages)]

    def update(
        self,
        iteration: int,
        walls: Mapping[int, Mapping[str, float]],
        more: Callable[[int], float],
    ) -> None:
        """Take an `iteration`.

        `walls`: by worker, seconds by kind of op; see SlowWorkers. `more`: see AlikeStages.
        """
        self._workers.update(walls)
        self._workers.accept()
        logs, times = self._workers.logs, dict[int, float]()
        for group in self._groups:
            row = sorted(logs.get(worker, 0.0) for worker in group)
            # Most are faster than is thought normal: that was learnt while they were slow.
            middle = row[(len(row) - 1) // 2]
            shared = middle if middle < 0 else max(0.0, row[0])
            times |= {w: math.exp(logs[w] - shared) for w in group if w in logs}
        self._follow(iteration, times, lambda worker: SLOW * (1 + more(worker)))
        before, self.whole, self.whole_again = self.whole, {}, {}
        for replica, workers in enumerate(self._each):
            slow = [self.slow[worker] for worker in workers if worker in self.slow]
            well = [self.well[worker] for worker in workers if worker in self.well]
            if len(slow) == len(workers) or (slow and replica in before):
                self.whole[replica] = _middle(slow)
            elif well and replica in before:
                self.whole_again[replica] = _middle(well)


def _middle(sights: Sequence[Sight]) -> Sight:
    """Return one sight for all `sights`, which are of the stages of one replica."""
    return Sight(
        median(one.now for one in sights), 1.0, max(one.since for one in sights),
        min(one.agree for one in sights), min(one.samples for one in sights),
    )  # fmt: skip
