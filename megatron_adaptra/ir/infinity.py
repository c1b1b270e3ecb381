"""Infinity in JSON, which has no number for it: null stands for it."""

from __future__ import annotations

import math


def null_if_infinite(value: float) -> float | None:
    """Return the `value` as JSON holds it: None for infinity."""
    return None if math.isinf(value) else value


def infinite_if_null(value: float | None) -> float:
    """Return the `value` read from JSON: infinity for None."""
    return math.inf if value is None else value
