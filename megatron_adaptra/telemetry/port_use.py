"""Whether the links of a worker share a port, by what messages lose when they come at once.

Over links of their own two messages that come at once take what each takes alone. Through one port
they take longer together, by as much as they would have overlapped: one waits for the other, or
both come at half the rate, and then twice as much. Which of them meet is told by when they began,
not by how long they took, since a receiver without a core makes any message look long.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from megatron_adaptra.telemetry.link_fit import by_themselves
from megatron_adaptra.transport.base import Stamps

WINDOW, FEWEST = 10, 5  # iterations that count, and how many of them show something at least
ALONE = 5  # messages, in these, from which it is known how late messages are anyway
SHARED, OWN = 0.5, 0.3  # of their overlap: lost above it for one port, below it for own links
MEET = 0.05  # of the seconds in which something came: messages that overlap less never meet


class PortUse(NamedTuple):
    """What the large messages of an iteration show, in bytes and seconds.

    Args:
        nbytes, seconds: that came, and while something was on its way.
        alone, late_alone: how many messages met none of another source, and by how much in all they
            were longer on their way than the fast ones.
        met, late_met: the same of those that did meet.
        overlap: for how long these would have come at once over links of their own, by pairs.
    """

    nbytes: float = 0.0
    seconds: float = 0.0
    alone: float = 0.0
    late_alone: float = 0.0
    met: float = 0.0
    late_met: float = 0.0
    overlap: float = 0.0


class _Span(NamedTuple):
    """When a message that came by itself was on its link, by the receiver's clock."""

    begin: float
    end: float
    nbytes: int
    source: int


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
    paces = sorted((span.end - span.begin) / span.nbytes for span in spans)
    pace = paces[len(paces) // 10] if paces else 0.0  # seconds of a byte that nothing has held up
    overlaps = [0.0] * len(spans)
    for i, j in _pairs(spans, pace):
        common = min(_due(spans[i], pace), _due(spans[j], pace)) - spans[j].begin
        overlaps[i] += common / 2
        overlaps[j] += common / 2
    counts, late = [0.0, 0.0], [0.0, 0.0]
    ends: dict[int, float] = {}  # by source, of what has begun
    for span, overlap in zip(spans, overlaps, strict=True):
        meets, alone = overlap > 0, pace * span.nbytes
        behind = any(end > span.begin for source, end in ends.items() if source != span.source)
        ends[span.source] = max(span.end, ends.get(span.source, -math.inf))
        if behind and not meets:  # behind what was late itself: perhaps held up by it
            continue
        counts[meets] += 1
        # Half the rate makes it twice as long. What is longer was held up by something else.
        late[meets] += min(max(0.0, span.end - span.begin - alone), alone)
    nbytes = sum(span.nbytes for span in spans)
    return PortUse(
        nbytes, _covered(spans), counts[0], late[0], counts[1], late[1], math.fsum(overlaps)
    )


def _due(span: _Span, pace: float) -> float:
    """When it would have come over a link of its own."""
    return span.begin + pace * span.nbytes


def _pairs(spans: Sequence[_Span], pace: float) -> Iterable[tuple[int, int]]:
    """Numbers of two `spans` from different sources that would overlap over links of their own."""
    under_way: list[int] = []
    for j, span in enumerate(spans):
        under_way = [i for i in under_way if _due(spans[i], pace) > span.begin]
        yield from ((i, j) for i in under_way if spans[i].source != span.source)
        under_way.append(j)


def _covered(spans: Iterable[_Span]) -> float:
    """Seconds in which at least one of `spans`, in the order of their begin, was under way."""
    covered, end = 0.0, -math.inf
    for span in spans:
        covered += max(0.0, span.end - max(span.begin, end))
        end = max(end, span.end)
    return covered


class PortModel:
    """Of one worker whose links are all thin, from what it has received since they are.

    `shared`: whether links that pass equally much do so because of one port. Where messages never
    meet, or always, that is not known: `never_meet`, and links are known by what each brings.
    """

    def __init__(self) -> None:
        self.shared = self.never_meet = False
        self._uses: deque[PortUse] = deque(maxlen=WINDOW)

    def add(self, use: PortUse) -> None:
        """Take an iteration."""
        if use.seconds <= 0:
            return
        self._uses.append(use)
        # What computes meanwhile makes messages late, so that one iteration shows little.
        total = PortUse(*map(math.fsum, zip(*self._uses, strict=True)))
        meets = total.overlap >= MEET * total.seconds
        self.never_meet = not meets and len(self._uses) == WINDOW
        if not meets:
            self.shared = False
        elif len(self._uses) >= FEWEST and total.alone >= ALONE:
            late = total.late_met - total.met * total.late_alone / total.alone
            self.shared = late > (OWN if self.shared else SHARED) * total.overlap

    @property
    def rate(self) -> float:
        """Bytes per second that its links bring; 0 before the first iteration."""
        return median(use.nbytes / use.seconds for use in self._uses) if self._uses else 0.0
