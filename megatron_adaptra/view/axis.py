"""Round tick values, and numbers the way people read them."""

from __future__ import annotations

import math


def ticks(top: float, about: int = 8) -> list[float]:
    """0 and the round values (steps of 1, 2 or 5) up to `top`, some `about` of them."""
    if not (top > 0 and math.isfinite(top)):
        return [0.0]
    rough = top / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(s for s in (1, 2, 5, 10) if s * power >= rough * (1 - 1e-9))
    return [i * step for i in range(int(top / step + 1e-9) + 1)]


def round_up(top: float, about: int = 5) -> float:
    """The first round value at or above `top`: where an axis of `about` so many ticks ends."""
    marks = ticks(top, about)
    step = marks[1] if len(marks) > 1 else 1.0
    return step * math.ceil(top / step - 1e-9) or 1.0


def ms(seconds: float) -> str:
    """`seconds` as text in ms."""
    return f"{number(1e3 * seconds)} ms"


def number(value: float) -> str:
    """A `value` in three or four digits, never an exponent: 0.123, 12.3, 660, 12345."""
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def size(nbytes: int) -> str:
    """`nbytes` as people write them: 4 KiB, 1.5 MiB."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << power:
            return f"{number(nbytes / (1 << power))} {unit}"
    return f"{nbytes} B"
