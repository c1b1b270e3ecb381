"""The middle of samples, and how far they are from it, whatever a few outliers are."""

from __future__ import annotations

from collections.abc import Collection
from statistics import median

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_NORMAL = 1.4826  # the standard deviation of a normal distribution, by its median deviation


def middle_of(samples: Collection[float]) -> tuple[float, float]:
    """The median of `samples`, and the standard deviation by their median deviation from it.

    Raises statistics.StatisticsError where there are none.
    """
    middle = median(samples)
    return middle, _NORMAL * median(abs(sample - middle) for sample in samples)


def medians(samples: Floats) -> Floats:
    """Along the last axis, the median of what is not nan; nan where all of it is."""
    rows = np.sort(samples, axis=-1)  # nan comes last
    count = np.count_nonzero(~np.isnan(rows), axis=-1, keepdims=True)
    low, high = (np.take_along_axis(rows, i // 2, axis=-1) for i in (count - 1, count))
    return ((low + high) / 2)[..., 0]
