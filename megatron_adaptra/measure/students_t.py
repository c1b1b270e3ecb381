"""The values that Student's t exceeds by chance alone.

Source: Student, "The Probable Error of a Mean" (1908); the sums are 26.7.3 and 26.7.4 of Abramowitz
and Stegun, "Handbook of Mathematical Functions" (1964).
"""

from __future__ import annotations

import math
from functools import cache


def tail(t: float, freedom: int) -> float:
    """Return the probability of more than `t`, at least 0, with so many degrees of `freedom`."""
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
