"""Figures of many stages in a few words."""

from __future__ import annotations

from collections.abc import Sequence

_LEAST = 3  # equal figures, or figures one apart, that become a range
_MOST = 8  # parts that are shown
_FIRST = 5  # of more than that so many, and the last


def ranges(values: Sequence[object]) -> str:
    """The `values`, one per stage: `12, 11, 10, 1`; of many stages `64 x 26, 250 to 3, ..., 1`.

    Equal values become `times x value`, whole numbers one apart `first to last`. What is still too
    long is cut in the middle.
    """
    if len(values) <= _MOST:
        return ", ".join(map(_word, values))
    parts, at = [], 0
    while at < len(values):
        same = _run(values, at, 0)
        steps = max(_run(values, at, by) for by in (1, -1))
        if same >= _LEAST:
            part, length = f"{same} x {_word(values[at])}", same
        elif steps >= _LEAST:
            part, length = f"{_word(values[at])} to {_word(values[at + steps - 1])}", steps
        else:
            part, length = _word(values[at]), 1
        parts.append(part)
        at += length
    if len(parts) > _MOST:
        parts = [*parts[:_FIRST], "...", parts[-1]]
    return ", ".join(parts)


def _run(values: Sequence[object], at: int, by: int) -> int:
    """How many values from `at` on are equal (`by` 0), or whole numbers that differ by `by`."""
    end = at + 1
    while end < len(values) and _follows(values[end - 1], values[end], by):
        end += 1
    return end - at


def _follows(one: object, other: object, by: int) -> bool:
    if by == 0:
        return one == other
    if not (isinstance(one, (int, float)) and isinstance(other, (int, float))):
        return False
    return float(one).is_integer() and other == one + by


def _word(value: object) -> str:
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else f"{value:.4g}"
    return str(value)
