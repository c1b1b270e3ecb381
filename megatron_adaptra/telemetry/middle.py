"""The middle of samples, and how far they are from it, whatever a few outliers are."""

from __future__ import annotations

from collections.abc import Collection
from statistics import median

_NORMAL = 1.4826  # the standard deviation of a normal distribution, by its median deviation


def middle_of(samples: Collection[float]) -> tuple[float, float]:
    """The median of `samples`, and the standard deviation by their median deviation from it.

    Raises statistics.StatisticsError where there are none.
    """
    middle = median(samples)
    return middle, _NORMAL * median(abs(sample - middle) for sample in samples)
