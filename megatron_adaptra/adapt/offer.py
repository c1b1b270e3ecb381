"""What one planner of a job would do about what it has seen, for another one that costs more."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

RECENT = 10  # iterations in which planners see the same change, one after the other


class Offer(NamedTuple):
    """A planner's answer to what has changed last.

    Args:
        number: of its answers so far, so that each is another one.
        leaves: share of an iteration as it is that it expects to be left; 1 where it does nothing.
        standing: it answers the same whatever changes.
    """

    number: int
    leaves: float
    standing: bool = False


# By the name of a remedy that is allowed, what asks its planner; None while that has no answer.
Offers = Mapping[str, Callable[[], Offer | None]]


class Offered:
    """Which of the `offers` are answers to a change that is known by now."""

    def __init__(self, offers: Offers) -> None:
        self.names = frozenset(offers)
        self._offers = offers
        self._before: deque[dict[str, Offer | None]] = deque(maxlen=RECENT)

    def remember(self) -> None:
        """An iteration is over in which nothing had changed."""
        self._before.append({name: self._ask(name) for name in self._offers})

    def _ask(self, name: str) -> Offer | None:
        """The planner's answer; one that fails, as the training does not need it, has none."""
        with contextlib.suppress(Exception):
            return self._offers[name]()
        return None

    def leaves(self, name: str) -> float | None:
        """Share of an iteration that remedy `name` is to leave, 0 to 1; None: nobody knows yet.

        An answer that was there RECENT iterations before the change is one to something else.
        """
        offer = self._ask(name)
        if offer is None:
            return None
        old = self._before[0].get(name) if self._before else None
        if old is not None and old.number == offer.number and not offer.standing:
            return None
        return min(1.0, max(0.0, offer.leaves))
