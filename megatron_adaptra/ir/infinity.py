"""Infinity in JSON, which has no number for it: null stands for it."""

from __future__ import annotations

import math


def null_if_infinite(value: float) -> float | None:
    """What JSON has for a `value` that may be infinite."""
    return None if math.isinf(value) else value


def infinite_if_null(value: float | None) -> float:
    """The `value` that JSON has, or infinity for null."""
    return math.inf if value is None else value
