"""Whether the links of a worker share a port, by what comes over them at once.

Two links that are thin by themselves bring twice as much while both bring something; two that share
a port bring no more than one. So each receiver reports how fast its large messages have come, apart
for stretches of time with messages from one source alone and from several.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from megatron_adaptra.telemetry.link_fit import by_themselves
from megatron_adaptra.transport.base import Stamps

WINDOW, FEWEST = 10, 5  # iterations that count, and how many of them show something at least
TOGETHER, APART = 0.4, 0.7  # gains below which a port is shared, and above which it is no more
SHOWS = 1.15  # sources at once, on average, from which on stretches show anything


class PortUse(NamedTuple):
    """Bytes and seconds of an iteration's stretches with messages from one source, or several.

    `sources`: seconds of the latter, each counted as often as sources brought something.
    """

    alone_bytes: float
    alone: float
    together_bytes: float
    together: float
    sources: float


def port_use(messages: Mapping[int, Sequence[Stamps]], transits: Mapping[int, float]) -> PortUse:
    """What large `messages` show, by source.

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
    found = [0.0] * 5
    for stretch in _stretches(spans):
        several = 2 * (len({span.source for span in stretch}) > 1)
        found[several] += sum(span.nbytes for span in stretch)
        found[several + 1] += max(span.end for span in stretch) - stretch[0].begin
        if several:
            found[4] += sum(span.end - span.begin for span in stretch)
    return PortUse(*found)


class _Span(NamedTuple):
    """When a message that came by itself was on its link, by the receiver's clock."""

    begin: float
    end: float
    nbytes: int
    source: int


def _stretches(spans: Iterable[_Span]) -> Iterator[list[_Span]]:
    """`spans`, in the order of their begin, with no pause in any of the parts."""
    stretch: list[_Span] = []
    end = -math.inf
    for span in spans:
        if span.begin >= end and stretch:
            yield stretch
            stretch = []
        stretch.append(span)
        end = max(end, span.end)
    if stretch:
        yield stretch


class PortModel:
    """Of one worker whose links are all thin, from what it has received since they are.

    `shared`: whether links that pass equally much do so because of one port. Not where they bring
    more together than one of them alone. Where they never brought something at once, one port is a
    likelier reason than several links; where they always did, links are known by what each brings
    then. What little is known changes nothing.
    """

    def __init__(self) -> None:
        self.shared = False
        self._rates: deque[float] = deque(maxlen=WINDOW)
        self._gains: deque[float] = deque(maxlen=WINDOW)
        self._alone = True  # so far: never two sources at once

    def add(self, use: PortUse) -> None:
        """Take an iteration."""
        if (seconds := use.alone + use.together) <= 0:
            return
        self._rates.append((use.alone_bytes + use.together_bytes) / seconds)
        self._alone = self._alone and use.sources <= SHOWS * use.together
        if (gain := _gain(use)) is not None:
            # What computes meanwhile makes messages late, so that one iteration shows little.
            self._gains.append(min(1.5, max(-0.5, gain)))
        if len(self._gains) >= FEWEST:
            least = APART if self.shared else TOGETHER
            self.shared = fmean(self._gains) < least
        elif len(self._rates) == WINDOW and self._alone:
            self.shared = True

    @property
    def rate(self) -> float:
        """Bytes per second that its links bring; 0 before the first iteration."""
        return median(self._rates) if self._rates else 0.0


def _gain(use: PortUse) -> float | None:
    """0 where several sources bring as much as one, 1 where each brings as much as alone."""
    if min(use.alone, use.alone_bytes, use.together, use.together_bytes) <= 0:
        return None
    sources = use.sources / use.together
    if sources < SHOWS:
        return None
    times = use.together_bytes / use.together / (use.alone_bytes / use.alone)
    return math.log(times) / math.log(sources)
