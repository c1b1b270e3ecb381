"""What a link takes for our messages, and what for Megatron's own, of which one kind is in use."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

from megatron_adaptra.measure.link_fit import LinkFit, Sample, slope_of

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
        self._slope: float | None = None  # of the last iteration, seconds per byte
        self._theirs: deque[float] = deque(maxlen=WELL)
        self._small: deque[float] = deque(maxlen=WELL)
        self._slopes: deque[float] = deque(maxlen=WELL)

    def add(self, small: float, busy: Iterable[Sample]) -> None:
        """Take an iteration's messages of ours.

        Args:
            small: seconds that a small one took.
            busy: seconds beyond that for which larger ones kept the link busy.
        """
        row = [Sample(0.0, small), *(Sample(n, small + s) for n, s in busy)]
        self._slope = slope_of(row)
        self._fit.add(row)
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

    def while_well(self, theirs: float, small: float) -> None:
        """Seconds of `theirs`, a message of Megatron's, and of a `small` one, while all is well.

        What larger ones of ours take then is what the last iteration has shown of it, if it had
        some: few do, and that a link is thin may be known for sure only later.
        """
        self._theirs.append(theirs)
        self._small.append(small)
        if self._slope is not None:
            self._slopes.append(self._slope)

    def as_stock(self, ours: float, nbytes: float) -> float:
        """What Megatron's message of `nbytes` takes where `ours` takes so many seconds."""
        if not self._small:
            return ours
        return median(self._theirs) + max(0.0, ours - self._ours(nbytes))

    def as_ours(self, theirs: float, nbytes: float) -> float:
        """The reverse of `as_stock`: from seconds of `theirs`, Megatron's message of `nbytes`."""
        if not self._small:
            return theirs
        return self._ours(nbytes) + max(0.0, theirs - median(self._theirs))

    def _ours(self, nbytes: float) -> float:
        """What a message of ours took while the link was well, as far as `wire` knows its bytes."""
        slope = max(0.0, median(self._slopes)) if self._thin and self._slopes else 0.0
        return median(self._small) + slope * nbytes
