"""Workers and replicas beside others that do the same: which of them are slow, since when."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ParamSpec

from megatron_adaptra.base.log import GOES_ON, log_line
from megatron_adaptra.diagnose.book import FindingBook
from megatron_adaptra.diagnose.watch import Samples, Sight
from megatron_adaptra.measure.slow_workers import SLOW, SlowWorkers

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


class BesideOthers:
    """A BesideOthers finds slow ones among workers, each beside the same stage of other replicas.

    Args:
        stages, replicas: see SlowWorkers.
        least: times as long as others, from which on one is slow; it stays so half of the way back.

    `slow`: by worker, a Sight of one that is slow. `well`: of one that has recovered in the last
    iteration. `held`: by slow worker, how many iterations in a row have each shown that by itself.
    """

    def __init__(self, stages: int, replicas: int, least: float) -> None:
        self.slow: dict[int, Sight] = {}
        self.well: dict[int, Sight] = {}
        self.held: dict[int, int] = {}
        self._least, self._workers = least, SlowWorkers(stages, replicas)
        self._samples = [Samples() for _ in range(stages * replicas)]

    def update(
        self,
        iteration: int,
        walls: Mapping[int, Mapping[str, float]],
        waits: Callable[[int], float],
    ) -> None:
        """Take an `iteration`.

        Args:
            iteration: its number.
            walls: by worker, seconds by kind of op; see SlowWorkers.
            waits: returns, by worker, the seconds that ops on its host waited for a core, per
                second that they computed: such ops compute longer, as caches and clocks are shared.
        """
        self._workers.update(walls)
        for worker, log in self._workers.logs.items():
            self._samples[worker].add(iteration, log)
        self._workers.accept()
        before, factors = self.slow, self._workers.factors()
        self.slow, self.well = {}, {}
        for worker in {*before, *(w for w, factor in factors.items() if factor >= SLOW)}:
            factor, samples = factors[worker], self._samples[worker]
            known = before.get(worker)
            least = self._least * (1 + waits(worker))
            # Where ops wait for cores, what is well again takes longer than SLOW now and then, too.
            if factor >= (least if known is None else min(least, max(SLOW, math.sqrt(least)))):
                sight = Sight(factor, 1.0, *samples.since(0.0, math.log(factor)))
                since = sight.since if known is None else known.since
                self.slow[worker] = sight._replace(since=since)
            elif known is not None:
                until, *counts = samples.since(math.log(known.now), 0.0)
                self.well[worker] = Sight(1.0, 1.0, until, *counts)
        held, logs = self.held, self._workers.logs
        self.held = {
            worker: held.get(worker, 0) + 1 if 2 * logs.get(worker, 0.0) >= math.log(one.now) else 0
            for worker, one in self.slow.items()
        }
