"""Changes of a link's delay: found by an EWMA chart, a materiality gate, 2-of-3 confirmation.

Source of the chart: Roberts, "Control Chart Tests Based on Geometric Moving Averages" (1959).
In a Monte Carlo comparison with CUSUM and Bayesian change-points it had the fewest false alarms and
found changes that matter at once. benchmarks/detector.py measures both.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from megatron_adaptra.measure.statistics import middle_of

LAMBDA, LIMIT = 0.3, 4.7
BASELINE = 4  # samples from which the first level is learned, ...
CALM = 100  # ... and how many refine it: with only 20, false alarms are five times as many
RELATIVE, ABSOLUTE = 0.10, 0.20  # material: 10 % of the level and 20 % of a stage's time


def differ(old: float, new: float) -> bool:
    """Return whether what took `old` when it was planned for takes clearly other seconds, `new`."""
    return abs(new - old) > RELATIVE / 2 * max(old, new)


def apart(one: float, other: float, times: float = 1 + RELATIVE) -> bool:
    """Return whether one factor is at least so many `times` the other: `one` or `other`."""
    return not 1 / times < one / other < times


class DelayChart:
    """A delay chart confirms changes of one directed link, given one delay per iteration.

    Args:
        floor: seconds below which a change means nothing, whatever a stage takes.
        lasting: so many delays in a row, out of the chart on one side, confirm a change even where
            they do not agree: then their median counts. 0: delays always have to agree.
        threshold: seconds on either side of 0. A change across it matters if it is at least half as
            large, whatever the level is. 0: there is no threshold.
    """

    def __init__(self, floor: float = 0.0, lasting: int = 0, threshold: float = 0.0) -> None:
        self.floor, self.threshold = floor, threshold
        self._run: deque[float] = deque(maxlen=lasting)  # delays in a row out on one side
        self.level: float | None = None  # the delay taken for normal: the last one planned for
        self.estimate = 0.0  # the delay now
        self.alarm = False  # whether the last delay was out; logged at once, a plan waits for more
        self._deviation = 0.0  # of the calm samples, as a standard deviation
        self._average = 0.0
        self._recent: deque[tuple[float, bool]] = deque(maxlen=3)  # sample, whether it is out
        self._calm: list[float] = []  # samples of the level, CALM at most

    @property
    def samples(self) -> int:
        """The number of samples from which the level is learned."""
        return len(self._calm)

    @property
    def outside(self) -> list[float]:
        """The samples out of the chart among the last three, the oldest first.

        Where a change `lasts`, all samples of the run that shows it.
        """
        if self.lasts:
            return list(self._run)
        return [sample for sample, is_out in self._recent if is_out]

    @property
    def lasts(self) -> bool:
        """True where the last delays, `lasting` of them, are all out on the same side."""
        return 0 < len(self._run) == self._run.maxlen

    def update(self, delay: float, stage_seconds: float) -> bool:
        """Take a `delay`; return whether a change is confirmed: 2 of the last 3 are out, and agree.

        Args:
            delay: seconds of this iteration.
            stage_seconds: what one microbatch takes; changes that are small beside it mean nothing.

        The first level counts as a change from zero: a link can be slow from the start.
        """
        if self.level is None:
            return self._begin(delay, stage_seconds)
        self._average = LAMBDA * delay + (1 - LAMBDA) * self._average
        # The level is a median of few samples, and as uncertain as these differ.
        uncertain = self._deviation * math.sqrt(math.pi / (2 * max(1, len(self._calm))))
        # At least 5 % of what a stage takes now, which may be more than when the level was learned.
        spread = max(self._deviation, 0.05 * self.level, 0.05 * stage_seconds, 1e-6)
        width = LIMIT * math.hypot(spread * math.sqrt(LAMBDA / (2 - LAMBDA)), uncertain)
        out = abs(self._average - self.level) > width and self._material(delay, stage_seconds)
        self.alarm = out
        self._recent.append((delay, out))
        if not out or (self._run and (self._run[-1] > self.level) != (delay > self.level)):
            self._run.clear()
        if out:
            self._run.append(delay)
        known = [sample for sample, _ in self._recent]
        # Right after a change was accepted the level stands in for the samples that are missing.
        self.estimate = median(known + [self.level] * (3 - len(known)))
        outside = self.outside
        if not out:
            # Learn a sample only once two more have come: it may be the first of another level.
            if len(self._calm) < CALM and len(known) == 3 and not outside:
                self._calm.append(known[0])
                self._learn()
            return False
        new = median(outside)
        if self.lasts:
            self.estimate = new
            return True
        # Two peaks by chance differ from each other; samples of a changed link do not.
        if len(outside) < 2 or not all(self._agrees(sample, new) for sample in outside):
            return False
        # A link changes in the middle of an iteration, so the first sample is of neither level.
        self.estimate = median(outside[1:])
        return True

    def _begin(self, delay: float, stage_seconds: float) -> bool:
        """Learn the first level; return whether the link proves slow from the start."""
        self._calm.append(delay)
        self.estimate = median(self._calm)
        if self.estimate < max(ABSOLUTE * stage_seconds, self.floor):
            if len(self._calm) >= BASELINE:
                self._average = self._learn()
            return False
        last = self._calm[-3:]
        new = median(last)
        if len(last) < 3 or any(abs(sample - new) > 0.5 * new for sample in last):
            return False  # it may have got slow just now: wait until three agree
        self.level, self.estimate, self._calm, self.alarm = 0.0, new, [], True
        self._average = new
        self._recent.extend((sample, True) for sample in last)
        return True

    def accept(self, stage_seconds: float) -> None:
        """Take the present delay, now planned for, as normal. `stage_seconds`: see `update`."""
        if self.level is None:
            return
        if not self._material(self.estimate, stage_seconds):
            return
        self._calm = [s for s in self.outside[1:] if self._agrees(s, self.estimate)] or [
            self.estimate
        ]
        self._average = self._learn()
        self._recent.clear()
        self._run.clear()
        self.alarm = False

    def resume(self, level: float) -> None:
        """Start from `level`, a delay that is planned for already; learn the spread anew."""
        self._calm, self._deviation = [level], 0.0
        self.level = self.estimate = self._average = level

    def _material(self, delay: float, stage_seconds: float) -> bool:
        """Return whether a `delay` differs from the level by enough to matter."""
        assert self.level is not None
        change = abs(delay - self.level)
        crosses = (abs(self.level) < self.threshold) != (abs(delay) < self.threshold)
        if crosses and change >= self.threshold / 2:
            return True
        return change >= max(RELATIVE * self.level, ABSOLUTE * stage_seconds, self.floor)

    def _agrees(self, sample: float, new: float) -> bool:
        """Return whether a `sample` is off the `new` level by at most half of the change."""
        assert self.level is not None
        return abs(sample - new) <= 0.5 * abs(new - self.level)

    def _learn(self) -> float:
        """Learn level and deviation from the calm samples; return the level."""
        self.level, self._deviation = middle_of(self._calm)
        return self.level
