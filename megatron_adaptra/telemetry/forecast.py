"""What comes next in a line of seconds, one per iteration: four simple ways to guess it.

benchmarks/replica_speed.py compares them on runs, by how far they are off over the next HORIZON
iterations; what came out is in docs/evidence/shares.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Protocol

HORIZON = 10  # iterations after a decision for which its plan is judged
LAMBDA = 0.3  # weight of the newest of an EWMA's samples, as in telemetry/detect.py
WINDOW = 8  # samples of the median
LEVEL, TREND = 0.3, 0.1  # Holt's alpha and beta
LEAST = 0.1  # of the level: a trend that leads below is not believed


class Forecast(Protocol):
    """A line of seconds. It has no value before the first sample."""

    def add(self, seconds: float) -> None:
        """Take the next sample, `seconds` above 0."""

    def value(self) -> float:
        """Seconds that are expected on average in the next HORIZON iterations."""


class LastValue:
    """It goes on as in the last iteration."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def add(self, seconds: float) -> None:
        """See `Forecast`: `seconds` of the next sample."""
        self._seconds = seconds

    def value(self) -> float:
        """See `Forecast`."""
        return self._seconds


class Ewma:
    """An exponentially weighted moving average (Roberts 1959, see telemetry/detect.py)."""

    def __init__(self) -> None:
        self._average: float | None = None

    def add(self, seconds: float) -> None:
        """See `Forecast`: `seconds` of the next sample."""
        before = seconds if self._average is None else self._average
        self._average = LAMBDA * seconds + (1 - LAMBDA) * before

    def value(self) -> float:
        """See `Forecast`."""
        return self._average or 0.0


class RunningMedian:
    """The median of the last WINDOW samples, which a few that are far off do not move."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=WINDOW)

    def add(self, seconds: float) -> None:
        """See `Forecast`: `seconds` of the next sample."""
        self._samples.append(seconds)

    def value(self) -> float:
        """See `Forecast`."""
        return median(self._samples) if self._samples else 0.0


class Holt:
    """A level and a trend, both exponentially weighted.

    Source: Holt, "Forecasting Seasonals and Trends by Exponentially Weighted Moving Averages"
    (1957; International Journal of Forecasting 20, 2004), sections 2 and 3.
    """

    def __init__(self) -> None:
        self._level: float | None = None
        self._trend = 0.0

    def add(self, seconds: float) -> None:
        """See `Forecast`: `seconds` of the next sample."""
        if self._level is None:
            self._level = seconds
            return
        before = self._level
        self._level = LEVEL * seconds + (1 - LEVEL) * (before + self._trend)
        self._trend = TREND * (self._level - before) + (1 - TREND) * self._trend

    def value(self) -> float:
        """See `Forecast`: half of the HORIZON ahead."""
        if self._level is None:
            return 0.0
        ahead = self._level + self._trend * (HORIZON + 1) / 2
        return max(ahead, LEAST * self._level)


FORECASTS: dict[str, Callable[[], Forecast]] = {
    "ewma": Ewma,
    "last": LastValue,
    "median": RunningMedian,
    "holt": Holt,
}
