"""The middle and the spread of samples, which a few outliers do not change much."""

from __future__ import annotations

from collections.abc import Collection
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
