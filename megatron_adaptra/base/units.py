"""Numbers, durations, rates and sizes as people write them. In the code: seconds, bytes/s, bytes.

Their length is limited: a pattern takes a time that grows with its square to fail.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import groupby

from megatron_adaptra.base.errors import BadInput

LONGEST = 1e9  # seconds: what a wait can last, and more than a delay ever is
_LONG = 60  # characters
_NUMBER = re.compile(r"([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)\s*([a-zA-Z/]*)")
_WHOLE = re.compile(r" *[+-]?[0-9]{1,30} *", re.ASCII)
_REAL = re.compile(
    r" *[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|inf|infinity|nan) *",
    re.ASCII | re.IGNORECASE,
)
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_BYTES_PER_SECOND = {
    "B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9,
    "bit/s": 0.125, "kbit/s": 125.0, "Mbit/s": 125e3, "Gbit/s": 125e6,
}  # fmt: skip
_BYTES = {
    "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30,
}  # fmt: skip


def whole(text: str) -> int:
    """Read `text` as a whole number in plain digits. ValueError, as from int, for any other.

    Python takes 1_000, digits of all scripts, and any length.
    """
    if _WHOLE.fullmatch(text) is None:
        raise ValueError(text)
    return int(text)


def number(text: str) -> float:
    """Read `text` as a number in plain digits, nan or inf; ValueError for any other."""
    if len(text) > _LONG or _REAL.fullmatch(text) is None:
        raise ValueError(text)
    return float(text)


def brief(values: Iterable[object], most: int = 40, whole: bool = False) -> str:
    """Write the `values` of all stages in about `most` characters at the most.

    With commas between where that fits, else equal neighbours as `26 x 64`, else not all of them,
    unless they have to be there as a `whole`.
    """
    words = [f"{each:g}" if isinstance(each, float) else str(each) for each in values]
    if len(text := ",".join(words)) <= most:
        return text
    runs = [(word, len(list(same))) for word, same in groupby(words)]
    words = [word if count == 1 else f"{word} x {count}" for word, count in runs]
    if len(text := ", ".join(words)) <= most or whole:
        return text
    kept = 1
    while kept + 2 < len(words) and len(", ".join([*words[: kept + 1], "...", words[-1]])) <= most:
        kept += 1
    return ", ".join([*words[:kept], "...", words[-1]])


def ten_digits(seconds: float) -> float:
    """The `seconds` to ten digits: of what differs in the last bits alone, the first is taken."""
    return float(f"{seconds:.9e}")


def size(nbytes: float, unit: str = "") -> str:
    """Write `nbytes` with four digits, rounded up, so that reading it again gives no less.

    `unit`: one of `parse_bytes`; by default the greatest of GB, MB, kB and B that is not too great.
    """
    unit = unit or next((u for u in ("GB", "MB", "kB") if nbytes >= _BYTES[u]), "B")
    value = nbytes / _BYTES[unit]
    digits = 0 if unit == "B" or not value else 3 - math.floor(math.log10(value))
    return f"{math.ceil(value * 10.0**digits - 1e-6) / 10.0**digits:.12g}{unit}"


# argparse says "invalid ... value" with these names.
whole.__name__, number.__name__ = "whole-number", "number"


def parse_seconds(text: str, field: str = "duration") -> float:
    """Read `text` as seconds: `40ms` is 0.04; units s, ms, us. BadInput names the `field`."""
    allowed = "it has to be a duration such as 40ms, 1.5s or 200us"
    seconds = _parse(text, field, _SECONDS, allowed)
    if seconds > LONGEST:
        raise BadInput(field, text, allowed)
    return seconds if seconds >= 1e-9 else 0.0


def parse_rate(text: str, field: str = "bandwidth") -> float:
    """Read `text` as bytes/s: `10MB/s` is 1e7; also bit/s. BadInput names the `field`."""
    return _parse(text, field, _BYTES_PER_SECOND, "it has to be a rate such as 10MB/s or 1Gbit/s")


def parse_bytes(
    text: str, field: str = "size", allowed: str = "it has to be a size such as 20GiB or 500MB"
) -> float:
    """Read `text` as bytes; units B, kB, MB, GB, KiB, MiB, GiB.

    Raises BadInput, which names the `field` and says what is `allowed`.
    """
    return _parse(text, field, _BYTES, allowed)


def parse_share(text: str, field: str = "share") -> float:
    """Read `text` as a share: `0.1%` is 0.001; less than 1.

    Raises BadInput, which names the `field`.
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*%", _brief(text))
    if match is None or not float(match[1]) < 100:
        raise BadInput(field, text, "it has to be a share such as 0.1%, below 100%")
    return float(match[1]) / 100


def _parse(text: str, field: str, units: dict[str, float], allowed: str) -> float:
    match = _NUMBER.fullmatch(_brief(text))
    if match is None or match[2] not in units:
        raise BadInput(field, text, allowed)
    value = float(match[1]) * units[match[2]]
    if not math.isfinite(value):
        raise BadInput(field, text, allowed)
    return value


def _brief(text: str) -> str:
    """Return `text` without outer blanks; empty, which fits no pattern, if it is too long."""
    stripped = str(text).strip()
    return stripped if len(stripped) <= _LONG else ""
