"""Values followed by iteration: what is normal, since when it is more, when it is well again."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import NamedTuple

from megatron_adaptra.measure.detect import ABSOLUTE, RELATIVE, DelayChart

BASELINE_SAMPLES = 4  # of a queue's first iterations, whose median is normal
RECENT_SAMPLES = 5  # whose median counts
BUSY_SHARE, CALM_SHARE = 1.0, 0.7  # of the time that ops compute: what they wait for a core
BUSY_TIMES = 2.0  # as much as normally, from which on a host is busy
KEPT_SAMPLES = 16  # in which the first one of a change is looked for
# Times as long as usual, from which on a worker is slow. Cores of one machine alone make it 1.45
# times for seconds; hosts of one job differ by a tenth or two without any fault.
SLOW = 1.5
LOOKED_AT, MOST = 4, 3  # iterations that are looked at, and how many of them have to agree


class Sight(NamedTuple):
    """A sight holds what a value is `now`, and normally, and `since` which iteration it is so.

    `agree` of so many `samples` since then are nearer to `now` than to what was before.
    """

    now: float
    normal: float
    since: int
    agree: int
    samples: int


class Samples:
    """A Samples keeps the last values, and finds in them since when they are others."""

    def __init__(self) -> None:
        self._row: deque[tuple[int, float]] = deque(maxlen=KEPT_SAMPLES)

    def add(self, iteration: int, value: float) -> None:
        """Take the `value` of an `iteration`."""
        self._row.append((iteration, value))

    def since(self, old: float, new: float) -> tuple[int, int, int]:
        """Return since which iteration values are `new` and not `old`; how many agree, of how many.

        A single value in between that is nearer to the old one does not break it: two in a row do.
        """
        row = [(i, abs(value - new) < abs(value - old)) for i, value in self._row]
        begin = len(row) - 1
        for place in range(len(row) - 1, -1, -1):
            if row[place][1]:
                begin = place
            elif place and not row[place - 1][1]:
                break
        agree = [nearer for _, nearer in row[begin:]]
        return row[begin][0], sum(agree), len(agree)


class LinkWatch:
    """A watch follows the seconds of one directed link.

    Args:
        floor: see DelayChart.

    `slow`: a Sight while the link takes longer than normally; else None. `well`: a Sight in the
    iteration in which it proves well again; else None.
    """

    def __init__(self, floor: float) -> None:
        self.slow: Sight | None = None
        self.well: Sight | None = None
        self._chart = DelayChart(floor)
        self._samples = Samples()
        self._normal: float | None = None

    def update(self, iteration: int, seconds: float, stage_seconds: float) -> None:
        """Take the `seconds` of an `iteration`. `stage_seconds`: see DelayChart."""
        self.well = None
        self._samples.add(iteration, seconds)
        before, chart = self._chart.level or 0.0, self._chart
        if not chart.update(seconds, stage_seconds):
            if self.slow is None and chart.level is not None:
                self._normal = chart.level  # more samples make it surer
            return
        now = chart.estimate
        chart.accept(stage_seconds)
        self._normal = normal = min(now, 0.0 if self._normal is None else self._normal)
        sight = Sight(now, normal, *self._samples.since(before, now))
        least = max(RELATIVE * normal, ABSOLUTE * stage_seconds, chart.floor)
        if now - normal >= least:
            since = sight.since if self.slow is None else self.slow.since
            self.slow = sight._replace(since=since)
        elif self.slow is not None:
            self.slow, self.well = None, sight


class MostlyWatch:
    """A watch follows a value that may differ from iteration to iteration: most of the last count.

    Args:
        looked_at, most: of so many last iterations, so many have to agree.
        normal: the value that is taken for normal until another one is known.

    `slow`, `well`: see LinkWatch.
    """

    def __init__(self, looked_at: int, most: int, normal: float) -> None:
        self.slow: Sight | None = None
        self.well: Sight | None = None
        self._most, self._normal = most, normal
        self._last: deque[tuple[float, bool, bool]] = deque(maxlen=looked_at)
        self._calm: deque[float] = deque(maxlen=KEPT_SAMPLES)
        self._samples = Samples()

    def update(self, iteration: int, value: float, least: float, over: float) -> None:
        """Take the `value` of an `iteration`: slow from `least` on, well below `over`."""
        self.well = None
        self._samples.add(iteration, value)
        self._last.append((value, value >= least, value < over))
        if value < over:
            self._calm.append(value)
        now = median(value for value, *_ in self._last)
        normal = median(self._calm) if self._calm else self._normal
        if sum(slow for _, slow, _ in self._last) >= self._most:
            if self.slow is None:
                self.slow = Sight(now, normal, *self._samples.since(normal, now))
            since, normal = self.slow.since, self.slow.normal
            agree, samples = self._samples.since(normal, now)[1:]
            self.slow = Sight(now, normal, since, agree, samples)
        elif self.slow is not None and sum(well for *_, well in self._last) >= self._most:
            before = self.slow.now
            self.slow, self.well = None, Sight(now, normal, *self._samples.since(before, now))


class SlowOnes:
    """A SlowOnes follows, by number, how many times as long as usual workers or stages take.

    Args:
        looked_at, most: see MostlyWatch.

    `slow`: the Sights of those that are slow. `well`: of those that prove well in this iteration.
    """

    def __init__(self, looked_at: int = LOOKED_AT, most: int = MOST) -> None:
        self.slow: dict[int, Sight] = {}
        self.well: dict[int, Sight] = {}
        self._looked_at, self._most = looked_at, most
        self._watches: dict[int, MostlyWatch] = {}

    def _follow(
        self, iteration: int, times: Mapping[int, float], least: Callable[[int], float]
    ) -> None:
        """Take how many `times` as long as usual each took in an `iteration`.

        `least`: returns from how many times on it is slow; half of the way back it is well.
        """
        for number, value in times.items():
            watch = self._watches.get(number)
            if watch is None:
                watch = self._watches[number] = MostlyWatch(self._looked_at, self._most, 1.0)
            bound = least(number)
            watch.update(iteration, value, bound, math.sqrt(bound))
        self.slow = {n: watch.slow for n, watch in self._watches.items() if watch.slow}
        self.well = {n: well for n in times if (well := self._watches[n].well)}

    def forget(self, number: int) -> None:
        """Begin anew with a `number`."""
        self._watches.pop(number, None)
        self.slow.pop(number, None)


class Queue:
    """A queue follows how long the ops on one host wait for a core, per second that they compute.

    `first`: so many iterations show what is normal.

    `busy`: a Sight while they wait clearly longer than normally; else None. `over`: a Sight in the
    iteration in which that has ended; else None.
    """

    def __init__(self, first: int = BASELINE_SAMPLES) -> None:
        self.busy: Sight | None = None
        self.over: Sight | None = None
        self._baseline, self._first = first, list[float]()
        self._samples = Samples()
        self._recent: deque[float] = deque(maxlen=RECENT_SAMPLES)

    @property
    def typical(self) -> float:
        """The share in the last iterations."""
        return median(self._recent) if self._recent else 0.0

    @property
    def more(self) -> float:
        """The share above normal, per second of a normal op with its wait.

        `typical` counts, or what the last iteration has: a change shows there first.
        """
        normal = median(self._first) if self._first else 0.0
        share = max(self.typical, self._recent[-1]) if self._recent else 0.0
        return max(0.0, (share - normal) / (1 + normal))

    def update(self, iteration: int, share: float) -> None:
        """Take the `share` of an `iteration`."""
        self.over = None
        self._samples.add(iteration, share)
        self._recent.append(share)
        if len(self._first) < self._baseline:
            self._first.append(share)
            return
        normal, now = median(self._first), self.typical
        least = max(BUSY_SHARE, BUSY_TIMES * normal)
        if self.busy is None and now >= least:
            self.busy = Sight(now, normal, *self._samples.since(normal, now))
        elif self.busy is not None and now < CALM_SHARE * least:
            self.over = Sight(now, normal, *self._samples.since(self.busy.now, now))
            self.busy = None
