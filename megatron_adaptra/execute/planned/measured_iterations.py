"""In which iterations ranks send each other when they were ready: in few, while nothing changes.

A rank that is late makes native's reduction longer at all others, so that these notice it without a
message. From the next iteration on they measure all of them, and their messages ask the other ranks
for the same: the late one, too, which has not noticed, but comes after them. What is too small to
be noticed is found more slowly, in the iterations that are measured in any case.
"""

from __future__ import annotations

import math
from collections import deque

from megatron_adaptra.measure.statistics import middle_of

FIRST = 16  # iterations at first, which are measured
EVERY = 4  # ... and afterwards one in so many
CHANCE = 3  # iterations that are measured after one that took longer, perhaps by chance, ...
LASTING = 16  # ... and after another one that did so meanwhile, or a vote
_FEWEST = 8  # reductions, of which it is known what they take, and by how much they differ
_SPREADS = 5  # standard deviations, by which one differs by more than chance


class MeasuredIterations:
    """At one rank.

    Args:
        matters: share of an iteration that a change has to be of.

    `until`: the iteration before which all are measured. It may be set by whom messages of other
    ranks reach: it is the latest one that any rank asks for.
    """

    def __init__(self, matters: float) -> None:
        self.until = FIRST
        self._matters = matters
        self._differed = -LASTING  # the last iteration that took another time than usual
        self._took: deque[float] = deque(maxlen=LASTING)
        self._usual, self._chance = 0.0, math.inf  # seconds, and by how many one may differ

    def __contains__(self, iteration: int) -> bool:
        return iteration < self.until or iteration % EVERY == 0

    def wake(self, iteration: int, lasting: int = LASTING) -> None:
        """Something has changed in `iteration`: measure so many after it, as `lasting` says."""
        self.until = max(self.until, iteration + 1 + lasting)

    def ended(self, iteration: int, seconds: float, period: float) -> None:
        """A reduction of native's is over; both in seconds.

        Args:
            iteration: of it.
            seconds: from its first gradients, here, to its end.
            period: of the iteration.
        """
        if abs(seconds - self._usual) > max(self._matters * period, self._chance):
            again = iteration - self._differed <= CHANCE
            self.wake(iteration, LASTING if again else CHANCE)
            self._differed = iteration
        self._took.append(seconds)
        # In others as little as can be is done: it would make their iterations longer.
        if len(self._took) >= _FEWEST and iteration in self:
            self._usual, spread = middle_of(self._took)
            self._chance = _SPREADS * spread
