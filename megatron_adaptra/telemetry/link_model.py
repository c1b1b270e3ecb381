"""What a link takes for our messages, and what for Megatron's own, of which one kind is in use."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

from megatron_adaptra.telemetry.link_fit import LinkFit, Sample

WELL = 5  # iterations whose medians are what a link takes while it is well


class LinkModel:
    """Of one directed link, in seconds.

    Our messages leave the GPU by way of the host, so one of them may take ten times as long as
    NCCL's on a link that is well. A link that slows down does so for both by as much: that is how
    the kind that is not in use is known.
    """

    def __init__(self) -> None:
        self._fit = LinkFit()
        self._thin = False
        self._theirs: deque[float] = deque(maxlen=WELL)
        self._ours: deque[float] = deque(maxlen=WELL)

    def add(self, small: float, busy: Iterable[Sample]) -> None:
        """Take an iteration's messages of ours.

        Args:
            small: seconds that a small one took.
            busy: seconds beyond that for which larger ones kept the link busy.
        """
        self._fit.add([Sample(0.0, small), *(Sample(n, small + s) for n, s in busy)])
        if (fit := self._fit.fit()) is not None:
            self._thin = fit.sure or (self._thin and fit.likely)

    def wire(self, nbytes: float) -> float:
        """Seconds that a message of ours of `nbytes` keeps the link busy; 0 if not known."""
        fit = self._fit.fit()
        return nbytes * fit.per_byte if fit is not None and self._thin else 0.0

    def small(self) -> float | None:
        """Seconds of a small message, with what two clocks differ by; None if not known."""
        fit = self._fit.fit()
        return None if fit is None else fit.delay

    def while_well(self, theirs: float, ours: float) -> None:
        """Seconds of `theirs`, a message of Megatron's, and of `ours`, while nothing is slow."""
        self._theirs.append(theirs)
        self._ours.append(ours)

    def as_stock(self, ours: float) -> float:
        """What Megatron's message takes where one of `ours` takes so many seconds."""
        if not self._ours:
            return ours
        return median(self._theirs) + max(0.0, ours - median(self._ours))

    def as_ours(self, theirs: float) -> float:
        """The reverse of `as_stock`: from seconds of `theirs`, a message of Megatron's."""
        if not self._ours:
            return theirs
        return median(self._ours) + max(0.0, theirs - median(self._theirs))
