"""Delay and bandwidth of a link, measured apart: seconds = delay + bytes / bandwidth.

Small messages show the delay, large ones both. A line is put through recent messages of any sizes
by the median of all slopes (Theil 1950, Sen 1968), weighted by the difference of bytes that a slope
is of: up to 29 % of the messages may be late by any amount.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from megatron_adaptra.transport.base import Stamps

WINDOW = 6  # iterations whose messages are fitted
GROUPS = 4  # sizes of messages that one iteration contributes
SURE = 3.0  # standard errors that seconds per byte have to differ from none by
_TO_DEVIATION = 1.4826  # of a normal distribution, by its median absolute deviation
_OF_MEDIAN = math.sqrt(math.pi / 2)  # standard error of a median, by that of a mean


class Sample(NamedTuple):
    """Messages of one iteration that have about one size: how many seconds they took."""

    nbytes: float
    seconds: float


class Fit(NamedTuple):
    """What a link takes: `delay` seconds, and `per_byte` seconds for each byte; standard errors."""

    delay: float
    per_byte: float
    delay_error: float
    per_byte_error: float

    @property
    def sure(self) -> bool:
        """Whether the link is known to take longer for more bytes."""
        return self.per_byte > SURE * self.per_byte_error

    @property
    def bandwidth(self) -> float:
        """Bytes per second; infinite where more bytes are not known to take longer."""
        return 1 / self.per_byte if self.sure else math.inf


class LinkFit:
    """The line through the messages of one directed link in the last WINDOW iterations."""

    def __init__(self) -> None:
        self._recent: deque[tuple[Sample, ...]] = deque(maxlen=WINDOW)
        self._line: Fit | None = None

    def add(self, samples: Iterable[Sample]) -> None:
        """Take one iteration's `samples`; what is no finite number of at least 0 is left out."""
        good = tuple(
            s for s in samples if 0 <= s.nbytes < math.inf and -math.inf < s.seconds < math.inf
        )
        if good:
            self._recent.append(good)
            self._fit()

    def restart(self, kept: int) -> None:
        """The link has changed: only the last `kept` iterations are of what it is now."""
        for _ in range(len(self._recent) - kept):
            self._recent.popleft()
        self._fit()

    def fit(self) -> Fit | None:
        """What the link takes now; None before there are messages of two sizes.

        Seconds are never negative, but the clocks of two hosts may differ: then the delay of the
        fit, and nothing else in it, contains the difference.
        """
        return self._line

    def _fit(self) -> None:
        # Here, and not where it is asked for, which a plan does several times per iteration.
        self._line = fit_line([sample for row in self._recent for sample in row])


def fit_line(samples: Sequence[Sample]) -> Fit | None:
    """The line through `samples`, with errors by their deviation from it; None for one size."""
    slopes = [
        ((b.seconds - a.seconds) / (b.nbytes - a.nbytes), abs(b.nbytes - a.nbytes))
        for i, a in enumerate(samples)
        for b in samples[i + 1 :]
        if a.nbytes != b.nbytes
    ]
    if not slopes:
        return None
    per_byte = max(0.0, _weighted_median(slopes))
    delay = median(s.seconds - per_byte * s.nbytes for s in samples)
    count, middle = len(samples), sum(s.nbytes for s in samples) / len(samples)
    wide = sum((s.nbytes - middle) ** 2 for s in samples)
    rest = median(abs(s.seconds - delay - per_byte * s.nbytes) for s in samples)
    # Two of the samples lie on the line in any case, which makes few of them look too certain.
    deviation = _OF_MEDIAN * _TO_DEVIATION * rest * math.sqrt(count / max(1, count - 2))
    return Fit(
        delay,
        per_byte,
        deviation * math.sqrt(1 / count + middle * middle / wide),
        deviation / math.sqrt(wide),
    )


def _weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """Of `values`, each with its weight."""
    half, seen = sum(weight for _, weight in values) / 2, 0.0
    ordered = sorted(values)
    for value, weight in ordered:
        seen += weight
        if seen >= half:
            return value
    return ordered[-1][0]


def transmissions(
    messages: Iterable[tuple[float, Stamps]], transit: float, quantile: float = 0.5
) -> list[Sample]:
    """Seconds that messages of one link kept it busy, by size; queueing is not in them.

    A link puts out one message after another, so a message that was sent while the one before was
    still leaving has only kept it busy since then. Every clock difference cancels.

    Args:
        messages: bytes and stamps of one iteration's messages over one link.
        transit: seconds from sent, on the sender's clock, to completed, on the receiver's, of a
            message of a few bytes.
        quantile: of the messages of one size; the lower quartile where processes wait for a core.

    Returns:
        A sample for each of GROUPS sizes at most.
    """
    busy: list[Sample] = []
    late: list[Sample] = []
    left = -math.inf
    for nbytes, t in sorted(messages, key=lambda message: message[1].completed):
        leaves, posted = t.completed - transit, t.posted - transit
        waited = not t.eager and posted > t.sent  # for its receive, for an unknown time
        ready = max(t.sent, posted) if waited else t.sent
        (late if waited else busy).append(Sample(nbytes, leaves - max(ready, left)))
        left = leaves
    busy = busy or late
    busy.sort()
    sizes = sorted({s.nbytes for s in busy})
    if len(sizes) <= GROUPS:
        groups = [[s for s in busy if s.nbytes == size] for size in sizes]
    else:
        groups = [
            busy[len(busy) * i // GROUPS : len(busy) * (i + 1) // GROUPS] for i in range(GROUPS)
        ]
    return [
        Sample(median(s.nbytes for s in g), _quantile([s.seconds for s in g], quantile))
        for g in groups
    ]


def _quantile(values: Sequence[float], quantile: float) -> float:
    """Of `values`; between two of them for the middle of an even number."""
    return median(values) if quantile == 0.5 else sorted(values)[int(len(values) * quantile)]
