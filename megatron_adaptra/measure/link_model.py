"""The model of a link for our messages and for Megatron's own, of which one kind is in use."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

from megatron_adaptra.measure.link_fit import LinkFit, Sample, slope_of

WELL = 5  # iterations whose medians are what a healthy link takes


class LinkModel:
    """A link model converts between seconds of our messages and Megatron's on a directed link.

    Our messages leave the GPU by way of the host, so one of them may take ten times as long as
    NCCL's on a healthy link. A link that slows down delays both by as much: that shows what the
    kind that is not in use takes.
    """

    def __init__(self) -> None:
        self._fit = LinkFit()
        self._thin = False
        self._slope: float | None = None  # of the last iteration, seconds per byte
        self._theirs: deque[float] = deque(maxlen=WELL)
        self._small: deque[float] = deque(maxlen=WELL)
        self._slopes: deque[float] = deque(maxlen=WELL)

    def add(self, small: float, busy: Iterable[Sample]) -> None:
        """Take what our messages took in an iteration.

        Args:
            small: seconds that a small one took.
            busy: by size, the seconds beyond `small` that larger ones kept the link busy.
        """
        row = [Sample(0.0, small), *(Sample(n, small + s) for n, s in busy)]
        self._slope = slope_of(row)
        self._fit.add(row)
        if (fit := self._fit.fit()) is not None:
            self._thin = fit.sure or (self._thin and fit.likely)

    def wire(self, nbytes: float) -> float:
        """Return the seconds that our message of `nbytes` keeps the link busy; 0 if not known."""
        fit = self._fit.fit()
        return nbytes * fit.per_byte if fit is not None and self._thin else 0.0

    def small(self) -> float | None:
        """Return a small message's seconds, with the difference of clocks; None if not known."""
        fit = self._fit.fit()
        return None if fit is None else fit.delay

    def while_well(self, theirs: float, small: float) -> None:
        """Note the seconds of Megatron's message, `theirs`, and of a `small` one on a healthy link.

        For larger ones of ours the last known slope is noted, too: few iterations show one, and
        only a later one may show for sure that the link is thin.
        """
        self._theirs.append(theirs)
        self._small.append(small)
        if self._slope is not None:
            self._slopes.append(self._slope)

    def as_stock(self, ours: float, nbytes: float) -> float:
        """Return the seconds of Megatron's message of `nbytes` where ours takes `ours` seconds."""
        if not self._small:
            return ours
        return median(self._theirs) + max(0.0, ours - self._ours(nbytes))

    def as_ours(self, theirs: float, nbytes: float) -> float:
        """Reverse `as_stock`: return our seconds for `nbytes` where Megatron's are `theirs`."""
        if not self._small:
            return theirs
        return self._ours(nbytes) + max(0.0, theirs - median(self._theirs))

    def _ours(self, nbytes: float) -> float:
        """Return our message's seconds on a healthy link; `nbytes` count if they do in `wire`."""
        slope = max(0.0, median(self._slopes)) if self._thin and self._slopes else 0.0
        return median(self._small) + slope * nbytes
