"""Seconds that are compared to choose between plans."""

from __future__ import annotations


def ten_digits(seconds: float) -> float:
    """The `seconds` to ten digits: of what differs in the last bits alone, the first is taken."""
    return float(f"{seconds:.9e}")
