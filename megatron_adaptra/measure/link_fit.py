"""Delay and bandwidth of a link, measured apart: seconds = delay + bytes / bandwidth.

Small messages show the delay, large ones both. Each iteration gives a slope, from messages that saw
the same link: the median of the slopes between any two of them (Theil 1950, Sen 1968), weighted by
the difference of bytes that a slope is of.

A link has a bandwidth only once it is sure that larger messages take longer. A healthy one, whose
messages differ by chance alone, is to be taken for a thin one in CHANCE of all iterations: that is
the likelihood ratio test of slopes that are normal around a mean against those around 0, by
Student's t. The least and the greatest slope count for less, for one message in a hundred may be
late by any amount (trimmed mean and its t: Tukey and McLaughlin 1963).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import NamedTuple

from megatron_adaptra.measure.statistics import exceeded
from megatron_adaptra.transport.base import Stamps

WINDOW = 10  # iterations with messages of several sizes that are fitted
LEAST = 5  # slopes that show anything: the first two after a change were chosen for agreeing
TRIMMED = 7  # slopes from which on the least and the greatest one count for less
GROUPS = 4  # sizes of messages that one iteration contributes
CHANCE = 1e-5  # per iteration, that a healthy link is taken for a thin one
STILL = 0.01  # the same, for a link that was known to be thin until then


class Sample(NamedTuple):
    """A sample holds the seconds that messages of about one size took in one iteration."""

    nbytes: float
    seconds: float


class Fit(NamedTuple):
    """A fit describes what a link takes: `delay` seconds, and `per_byte` seconds for each byte.

    `mean`: the trimmed mean of so many `slopes`; `error`: its standard error, which has so many
    degrees of `freedom`.
    """

    delay: float
    per_byte: float
    mean: float
    error: float
    slopes: int
    freedom: int

    @property
    def sure(self) -> bool:
        """True where the link certainly takes longer for more bytes."""
        return self._beyond(CHANCE)

    @property
    def likely(self) -> bool:
        """True where a link that took longer for more bytes probably still does."""
        return self._beyond(STILL)

    def _beyond(self, chance: float) -> bool:
        return self.slopes >= LEAST and self.mean > exceeded(chance, self.freedom) * self.error


class LinkFit:
    """A link fit uses one directed link's last WINDOW iterations with several message sizes."""

    def __init__(self) -> None:
        self._recent: deque[tuple[tuple[Sample, ...], float]] = deque(maxlen=WINDOW)
        self._fit: Fit | None = None

    def add(self, samples: Iterable[Sample]) -> None:
        """Take one iteration's `samples`; leave out impossible bytes and infinite seconds."""
        row = tuple(
            s for s in samples if 0 <= s.nbytes < math.inf and -math.inf < s.seconds < math.inf
        )
        if (slope := slope_of(row)) is not None:
            self._recent.append((row, slope))
            self._forget()
            # Here, and not in `fit`, which a plan calls several times per iteration.
            self._fit = fit_rows(self._recent)

    def fit(self) -> Fit | None:
        """Return the fit of what the link takes now; None before there are messages of two sizes.

        If the clocks of two hosts differ, the difference is in the delay of the fit, and in nothing
        else of it; so a delay may be negative.
        """
        return self._fit

    def _forget(self) -> None:
        """Drop iterations before a change: the last two slopes differ from them by half, and agree.

        They agree if they differ from each other by less than a quarter of the change.
        """
        if len(self._recent) < 3:
            return
        *before, one, two = (slope for _, slope in self._recent)
        old, new = median(before), (one + two) / 2
        change = abs(new - old)
        if change > max(abs(new), abs(old)) / 2 and abs(one - two) < change / 4:
            while len(self._recent) > 2:
                self._recent.popleft()


def slope_of(samples: Sequence[Sample]) -> float | None:
    """Return the seconds per byte of one iteration's `samples`; None where they have one size."""
    slopes = [
        ((b.seconds - a.seconds) / (b.nbytes - a.nbytes), abs(b.nbytes - a.nbytes))
        for i, a in enumerate(samples)
        for b in samples[i + 1 :]
        if a.nbytes != b.nbytes
    ]
    return _weighted_median(slopes) if slopes else None


def fit_rows(rows: Sequence[tuple[Sequence[Sample], float]]) -> Fit:
    """Fit iterations together: `rows` of the samples and the slope of each, at least one."""
    slopes = sorted(slope for _, slope in rows)
    per_byte = max(0.0, median(slopes))
    delay = median(s.seconds - per_byte * s.nbytes for row, _ in rows for s in row)
    count = len(slopes)
    cut = 1 if count >= TRIMMED else 0
    inside = slopes[cut : count - cut]
    within = [min(max(x, inside[0]), inside[-1]) for x in slopes]
    middle = fmean(within)
    deviation = math.sqrt(sum((x - middle) ** 2 for x in within) / max(1, count - 1))
    error = deviation / ((1 - 2 * cut / count) * math.sqrt(count))
    return Fit(delay, per_byte, fmean(inside), error, count, count - 2 * cut - 1)


def _weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """Return the weighted median of `values`, each given with its weight."""
    half, seen = sum(weight for _, weight in values) / 2, 0.0
    ordered = sorted(values)
    for value, weight in ordered:
        seen += weight
        if seen >= half:
            return value
    return ordered[-1][0]


class Transfer(NamedTuple):
    """A transfer holds a message's `stamps`, and the `seconds` it would take on an idle link.

    `waited`: True where it waited for its receive, for an unknown time. `queued`: True where it
    queued behind the message before.
    """

    stamps: Stamps
    seconds: float
    waited: bool
    queued: bool


def by_themselves(messages: Iterable[Stamps], transit: float) -> list[Transfer]:
    """Return one link's messages with their seconds without queueing, in order of arrival.

    A link puts out one message after another: one that was sent while another was still leaving
    kept the link busy only from then on. Every clock difference but that in `transit` cancels.

    Args:
        messages: of one iteration.
        transit: seconds from sent, on the sender's clock, to completed, on the receiver's, of a
            message of a few bytes.
    """
    found, left = [], -math.inf
    for t in sorted(messages, key=lambda t: t.completed):
        leaves, posted = t.completed - transit, t.posted - transit
        waited = not t.eager and posted > t.sent
        ready = max(t.sent, posted) if waited else t.sent
        found.append(Transfer(t, transit + leaves - max(ready, left), waited, left > ready))
        left = leaves
    return found


def transmissions(messages: Iterable[Stamps], transit: float) -> list[Sample]:
    """Return the seconds that `messages` of one link kept it busy, by size; see `by_themselves`.

    There is one sample per size, per group of sizes where there are more than GROUPS. It is the
    lower quartile, for processes wait for cores. `transit`: as there.
    """
    each = by_themselves(messages, transit)
    each = [one for one in each if not one.waited] or each
    busy = sorted(Sample(one.stamps.nbytes, one.seconds - transit) for one in each)
    sizes = sorted({s.nbytes for s in busy})
    if len(sizes) <= GROUPS:
        groups = [[s for s in busy if s.nbytes == size] for size in sizes]
    else:
        groups = [
            busy[len(busy) * i // GROUPS : len(busy) * (i + 1) // GROUPS] for i in range(GROUPS)
        ]
    return [
        Sample(median(s.nbytes for s in g), sorted(s.seconds for s in g)[len(g) // 4])
        for g in groups
    ]
