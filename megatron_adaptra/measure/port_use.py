"""The port that a worker's links may share, found by what messages lose when they meet.

Over links of their own two messages that come at once take what each takes alone. Through one port
they take longer together, by as much as they would have overlapped: one waits for the other, or
both come at half the rate, and then twice as much. Which messages meet is judged by when they
began, not by how long they took, since a receiver without a core makes any message look long.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from megatron_adaptra.measure.link_fit import by_themselves
from megatron_adaptra.transport.base import Stamps

WINDOW, FEWEST = 20, 5  # iterations that count, and how many are needed for a first result
RATED = 10  # the last of these, which give the rate
# Seconds that messages take longer per second of overlap: over links of their own less than OWN,
# through one port more than SHARED.
OWN, SHARED = 0.7, 0.3
ERRORS = 3.0  # standard errors that are left to chance
_FITTED = 2  # parameters: a slope, and how late messages are anyway
_EXACT = 1e-9  # share of a sum of squares that rounding may leave


class PortUse(NamedTuple):
    """A port use sums up the large messages of an iteration, in bytes and seconds.

    Args:
        nbytes, seconds: bytes that came, and seconds while something was on its way.
        messages: how many of them nothing has held up but messages which they met.
        overlap, overlap2: sum and sum of squares of the seconds for which these would have come at
            once over links of their own; half of an overlap counts for each of two.
        late, late2, product: sum and sum of squares of the seconds that these took longer than fast
            ones do, and sum of the products of that with the overlap.
    """

    nbytes: float = 0.0
    seconds: float = 0.0
    messages: float = 0.0
    overlap: float = 0.0
    overlap2: float = 0.0
    late: float = 0.0
    late2: float = 0.0
    product: float = 0.0


class _Span(NamedTuple):
    """A span holds when a message was on its link, without queueing, by the receiver's clock."""

    begin: float
    end: float
    nbytes: int
    source: int


def port_use(messages: Mapping[int, Sequence[Stamps]], transits: Mapping[int, float]) -> PortUse:
    """Sum up large `messages`, given by source.

    `transits`: by source, seconds as for `by_themselves`.
    """
    spans = sorted(
        _Span(
            one.stamps.completed - max(0.0, one.seconds - transits[source]),
            one.stamps.completed,
            one.stamps.nbytes,
            source,
        )
        for source, some in messages.items()
        for one in by_themselves(some, transits[source])
    )
    paces = sorted((span.end - span.begin) / span.nbytes for span in spans)
    pace = paces[len(paces) // 10] if paces else 0.0  # seconds per byte, not held up
    overlaps = [0.0] * len(spans)
    for i, j in _pairs(spans, pace):
        common = min(_due(spans[i], pace), _due(spans[j], pace)) - spans[j].begin
        overlaps[i] += common / 2
        overlaps[j] += common / 2
    rows = []
    ends: dict[int, float] = {}  # by source, of messages that have begun
    for span, overlap in zip(spans, overlaps, strict=True):
        behind = any(end > span.begin for source, end in ends.items() if source != span.source)
        ends[span.source] = max(span.end, ends.get(span.source, -math.inf))
        if behind and not overlap:  # behind a late message, and perhaps held up by it
            continue
        # Half the rate makes it twice as long. More than that has another cause.
        alone = pace * span.nbytes
        late = min(max(0.0, span.end - span.begin - alone), alone)
        rows.append((1.0, overlap, overlap * overlap, late, late * late, overlap * late))
    nbytes = sum(span.nbytes for span in spans)
    return PortUse(nbytes, _covered(spans), *map(sum, zip(*rows, strict=True)))


def _due(span: _Span, pace: float) -> float:
    """Return when a message would have come over a link of its own."""
    return span.begin + pace * span.nbytes


def _pairs(spans: Sequence[_Span], pace: float) -> Iterable[tuple[int, int]]:
    """Yield numbers of two `spans` of different sources that would overlap on their own links."""
    under_way: list[int] = []
    for j, span in enumerate(spans):
        under_way = [i for i in under_way if _due(spans[i], pace) > span.begin]
        yield from ((i, j) for i in under_way if spans[i].source != span.source)
        under_way.append(j)


def _covered(spans: Iterable[_Span]) -> float:
    """Return the seconds in which any of `spans`, in the order of their begin, was under way."""
    covered, end = 0.0, -math.inf
    for span in spans:
        covered += max(0.0, span.end - max(span.begin, end))
        end = max(end, span.end)
    return covered


class PortModel:
    """A port model finds out whether one worker's links, all of them thin, share a port.

    Attributes:
        shared: True where links that pass equally much do so because of one port.
        silent: True where nothing has shown either for long, as where messages never meet.
    """

    def __init__(self) -> None:
        self.shared = self.silent = False
        self._silence = 0
        self._uses: deque[PortUse] = deque(maxlen=WINDOW)

    def add(self, use: PortUse) -> None:
        """Take what an iteration has shown."""
        if use.seconds <= 0:
            return
        self._uses.append(use)
        # Computing makes messages late, too, so that one iteration shows little.
        lost, error = _lost(PortUse(*map(sum, zip(*self._uses, strict=True))))
        shared, own = lost - ERRORS * error > SHARED, abs(lost) + ERRORS * error < OWN
        self._silence += 1
        if shared != own and len(self._uses) >= FEWEST:
            self.shared, self._silence = shared, 0
        self.silent = self._silence >= WINDOW

    @property
    def rate(self) -> float:
        """The bytes per second that its links bring together; 0 before the first iteration."""
        last = list(self._uses)[-RATED:]
        return median(use.nbytes / use.seconds for use in last) if last else 0.0


def _lost(use: PortUse) -> tuple[float, float]:
    """Return the seconds that messages take longer per second of overlap, and the standard error.

    A fit by least squares: 0 over links of their own, 1 where one waits for the other, 2 where both
    get half the rate. The error is infinite where overlaps are all alike.
    """
    if use.messages <= _FITTED:
        return 0.0, math.inf
    # Products, not powers: those of absurd numbers are infinite, and raise nothing.
    varies = use.overlap2 - use.overlap * use.overlap / use.messages
    if varies <= _EXACT * use.overlap2:
        return 0.0, math.inf
    together = use.product - use.overlap * use.late / use.messages
    rest = use.late2 - use.late * use.late / use.messages - together * together / varies
    return together / varies, math.sqrt(max(0.0, rest) / (use.messages - _FITTED) / varies)
