"""Figures of samples: a middle and a spread that outliers hardly change, and what chance exceeds.

Source: Student, "The Probable Error of a Mean" (1908); the sums are 26.7.3 and 26.7.4 of Abramowitz
and Stegun, "Handbook of Mathematical Functions" (1964).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import cache
from statistics import median

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_NORMAL = 1.4826  # the standard deviation of a normal distribution, by its median deviation


def middle_of(samples: Collection[float]) -> tuple[float, float]:
    """Return the median of `samples` and their standard deviation, from their median deviation.

    Raises statistics.StatisticsError where there are none.
    """
    middle = median(samples)
    return middle, _NORMAL * median(abs(sample - middle) for sample in samples)


def medians(samples: Floats) -> Floats:
    """Return medians along the last axis, without nan; nan where all samples are nan."""
    rows = np.sort(samples, axis=-1)  # nan comes last
    count = np.count_nonzero(~np.isnan(rows), axis=-1, keepdims=True)
    low, high = (np.take_along_axis(rows, i // 2, axis=-1) for i in (count - 1, count))
    return ((low + high) / 2)[..., 0]


def tail(t: float, freedom: int) -> float:
    """Return the probability of more than Student's `t`, at least 0; `freedom`: degrees."""
    angle = math.atan(t / math.sqrt(freedom))
    square, odd = math.cos(angle) ** 2, freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= square * (k - 1) / k
        total += term
    within = math.sin(angle) * total
    if odd:
        within = (angle + within) * 2 / math.pi
    return (1 - within) / 2


@cache
def exceeded(chance: float, freedom: int) -> float:
    """Return the t exceeded with this `chance`, 1e-12 to 0.5, at so many degrees of `freedom`."""
    low, high = 0.0, 1.0
    while tail(high, freedom) > chance:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, freedom) > chance else (low, middle)
    return high
