"""Slow workers of several replicas, and by how much, from what one microbatch takes each.

Workers of one stage do the same work, so each has the others for a control group (Greyhound
compares a group with the median of those in the same position). A worker's own past decides where
peers alone cannot: of two that differ, the one that has changed is the slow one, and a change that
all of them share is the stage's. Changes are found with the chart, gate and confirmation of links,
and have to be confirmed twice in a row, by the same factor: single iterations of a worker take
longer more often than a message is late, and some of them close together are no slow worker. On a
busy machine a slow worker's factors do not agree: enough slow iterations in a row count as well.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.routes import worker_name
from megatron_adaptra.measure.detect import ABSOLUTE, DelayChart, apart
from megatron_adaptra.measure.op_seconds import WINDOW

SLOW = 1.2  # times as long as peers, from which on a worker is called slow
SURE = 20  # samples from which on the level of a chart is as sure as a confirmed change
LASTING = 6  # iterations in a row out of a chart that show a slow worker, however they differ
TRY_AGAIN = 50  # iterations without a microbatch, after which it may have healed
_LEAST, _MOST = 1e-9, 1e9  # seconds; others are nonsense, whose ratios may be infinite
# Charts are of the logarithm of times: noise of ops is a share of what they take. A change counts
# from ABSOLUTE of this on, and from half of that where a worker gets to be SLOW or no longer is.
_UNIT = math.log(SLOW) / ABSOLUTE
_NOISE = math.log(SLOW) / 2  # a stage that moves by less is followed, but by its normal alone


class SlowWorkers:
    """A detector finds slow workers among all, numbered as in `ir.routes`.

    Args:
        stages: how many each replica has.
        replicas: at least 2.

    `charts`: by worker, a chart of the logarithm of its time relative to its peers'. `logs`: the
    last sample of each chart, by worker that has one of the last iteration.

    Raises:
        BadInput: too few stages or replicas.
    """

    def __init__(self, stages: int, replicas: int) -> None:
        if stages < 1:
            raise BadInput("stages", stages, "at least 1")
        if replicas < 2:
            raise BadInput("replicas", replicas, "at least 2: workers are compared with peers")
        self._stages, self._workers = stages, stages * replicas
        self.logs: dict[int, float] = {}
        self.charts = {
            worker: DelayChart(lasting=LASTING, threshold=math.log(SLOW))
            for worker in range(self._workers)
        }
        self._groups = [range(stage, self._workers, stages) for stage in range(stages)]
        self._normal = [_Normal() for _ in self._groups]
        self._suspected: dict[int, float] = {}  # factors that charts have confirmed once, ...
        self._confirmed: set[int] = set()  # ... and workers whose factors were confirmed again
        self._named: dict[int, float] = {}  # logarithms that are not 0, by the last decision
        self._decided = dict.fromkeys(self.charts, 1.0)
        self._unmeasured = dict.fromkeys(self.charts, 0)  # iterations since the last sample

    def update(self, times: Mapping[int, Mapping[str, float]]) -> list[int]:
        """Take one iteration; return the workers whose factor is not the one planned for.

        Args:
            times: by worker, seconds by kind of op. One that is missing, or ran no microbatch,
                keeps its factor. Seconds are of one op, so that it does not matter how many there
                were; only kinds of ops that others ran too, or that it ran before, count.

        They are returned again with each iteration until `accept`, or until they are as before.

        Raises:
            BadInput: there is no such worker.
        """
        for worker in times:
            if worker not in self.charts:
                raise BadInput("worker", worker, f"0 to {self._workers - 1}")
        for worker in self.charts:
            self._unmeasured[worker] += 1
        self.logs = {}
        for normal, group in zip(self._normal, self._groups, strict=True):
            self._update_group(normal, {w: times[w] for w in group if times.get(w)})
        now = self.factors()
        return [w for w, factor in now.items() if apart(factor, self._decided[w])]

    def _update_group(self, normal: _Normal, wall: Mapping[int, Mapping[str, float]]) -> None:
        times = normal.times(wall)
        if not times:
            return
        levels = {worker: self.charts[worker].level for worker in times}
        moved = {worker: math.log(times[worker]) - (levels[worker] or 0.0) for worker in times}
        settled = None not in levels.values()
        common = _middle(list(moved.values()), settled)
        if settled and len(moved) == 1:
            common = 0.0  # of a worker whose peers are idle its own past is all there is
        normal.add(wall, {worker: seconds / math.exp(common) for worker, seconds in times.items()})
        if settled:  # their common noise is no movement, and with two of them mostly one's own
            common = math.copysign(max(0.0, abs(common) - _NOISE), common)
        for worker, seconds in times.items():
            self._unmeasured[worker] = 0
            chart = self.charts[worker]
            self.logs[worker] = math.log(seconds) - common
            confirmed = chart.update(self.logs[worker], _UNIT)
            before = self._suspected.pop(worker, None)
            self._confirmed.discard(worker)
            if confirmed:
                factor = self._suspected[worker] = math.exp(median(chart.outside))
                if chart.lasts or (before is not None and not apart(factor, before)):
                    self._confirmed.add(worker)

    def factors(self) -> dict[int, float]:
        """Return, by worker, how many times a healthy worker's seconds its ops take; 1: healthy.

        The smallest of a stage is never above 1: slowness that all workers share is the stage's.
        """
        logs = {worker: self._log(worker) for worker in self.charts}
        found: dict[int, float] = {}
        for group in self._groups:
            all_of_it = max(0.0, min(logs[worker] for worker in group))
            found |= {w: math.exp(_that_matters(logs[w] - all_of_it)) for w in group}
        return found

    def slow(self) -> dict[int, float]:
        """Return the factors that are not 1, for `ReplicaConditions.slow`."""
        return {worker: factor for worker, factor in self.factors().items() if factor != 1.0}

    def accept(self) -> None:
        """Note that the plan in force is made for the workers as they are now."""
        self._named = {w: log for w in self.charts if (log := self._log(w))}
        for worker in self._confirmed:
            self.charts[worker].accept(_UNIT)
            del self._suspected[worker]
        self._confirmed.clear()
        self._decided = self.factors()

    def alarms(self) -> list[str]:
        """Return the workers whose last sample is out of its chart, as `"1.2"`."""
        return [worker_name(w, self._stages) for w, chart in self.charts.items() if chart.alarm]

    def to_try(self) -> list[int]:
        """Return slow workers not measured for TRY_AGAIN iterations, which need a microbatch.

        A worker from which a plan has taken all microbatches cannot show that it has healed.
        """
        return [w for w in sorted(self._named) if self._unmeasured[w] >= TRY_AGAIN]

    def _log(self, worker: int) -> float:
        """Return the logarithm of a `worker`'s factor; 0 where it is too small to plan for."""
        if worker in self._confirmed:
            return _that_matters(self.charts[worker].estimate)
        chart = self.charts[worker]
        if chart.level is None or chart.samples < SURE:
            return self._named.get(worker, 0.0)
        # Where the first samples were noisy a chart may take slow for normal: it knows no peers.
        slow = worker in self._named or abs(chart.level) >= math.log(SLOW)
        return _that_matters(chart.level) if slow else 0.0


def worker_in_words(worker: int, factor: float, stages: int) -> str:
    """Describe that a `worker` takes `factor` times as long as peers; `stages`: of a replica."""
    takes = f"{factor:.1f} times as long as its peers"
    if not apart(factor, 1.0):
        takes = "as long as its peers again"
    return f"worker {worker_name(worker, stages)} takes {takes}"


class _Normal:
    """A normal holds one stage's op seconds on a healthy worker: the last ones of each kind."""

    def __init__(self) -> None:
        self._seconds: dict[str, deque[float]] = {}

    def times(self, wall: Mapping[int, Mapping[str, float]]) -> dict[int, float]:
        """Return, by worker of `wall`, how many times as long as normally its ops take."""
        seconds = {kind: median(window) for kind, window in self._seconds.items()}
        if not seconds and wall:  # at first they have only each other
            kinds = set.intersection(*(set(row) for row in wall.values()))
            each = sorted(wall.values(), key=lambda row: sum(row[kind] for kind in kinds))
            seconds = {kind: each[(len(each) - 1) // 2][kind] for kind in kinds}
        found = {}
        for worker, row in wall.items():
            known = row.keys() & seconds.keys()
            takes, normally = sum(row[k] for k in known), sum(seconds[k] for k in known)
            if all(_LEAST < total < _MOST for total in (takes, normally)):
                found[worker] = takes / normally
        return found

    def add(self, wall: Mapping[int, Mapping[str, float]], factors: Mapping[int, float]) -> None:
        """Take the seconds of `wall`, which are `factors` times those of a healthy worker."""
        rows: dict[str, list[float]] = {}
        for worker, factor in factors.items():
            for kind, seconds in wall[worker].items():
                rows.setdefault(kind, []).append(seconds / factor)
        for kind, row in rows.items():
            self._seconds.setdefault(kind, deque(maxlen=WINDOW)).append(median(row))


def _middle(moved: Sequence[float], settled: bool) -> float:
    """Return by how much all workers of a stage have moved alike, from what each has `moved`.

    This is the median. Of two in the middle it is the one that has moved less, since a stage rarely
    changes; the faster one until they are `settled` and have a past to compare with.
    """
    row = sorted(moved)
    low, high = row[(len(row) - 1) // 2], row[len(row) // 2]
    return high if settled and abs(high) < abs(low) else low


def _that_matters(log: float) -> float:
    """Return the logarithm of a factor, `log`, or 0 if the factor might as well be 1."""
    return log if apart(math.exp(log), 1.0) else 0.0
