"""Offers of cheaper remedies, which the planner of a costlier remedy reads before it acts."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

RECENT = 10  # iterations within which all planners notice the same change


class Offer(NamedTuple):
    """An offer states what a planner's remedy would leave of an iteration after the last change.

    Args:
        number: counts the planner's offers, so that a new one can be recognised.
        leaves: expected share of an iteration's present seconds; 1 where the remedy does nothing.
        standing: the planner offers the same whatever changes.
    """

    number: int
    leaves: float
    standing: bool = False


# By name of an allowed remedy, the call that asks its planner; it returns None before an answer.
Offers = Mapping[str, Callable[[], Offer | None]]


class Offered:
    """A reader of `offers` returns those that answer the last change, and no older ones."""

    def __init__(self, offers: Offers) -> None:
        self.names = frozenset(offers)
        self._offers = offers
        self._before: deque[dict[str, Offer | None]] = deque(maxlen=RECENT)

    def remember(self) -> None:
        """Keep the offers of an iteration without a change: once one comes, they are old."""
        self._before.append({name: self._ask(name) for name in self._offers})

    def _ask(self, name: str) -> Offer | None:
        """Return the offer of remedy `name`; None without one, or on an error: training goes on."""
        with contextlib.suppress(Exception):
            return self._offers[name]()
        return None

    def leaves(self, name: str) -> float | None:
        """Return the share of an iteration, 0 to 1, that remedy `name` would leave; None: unknown.

        An offer that was there RECENT iterations before the change does not count.
        """
        offer = self._ask(name)
        if offer is None:
            return None
        old = self._before[0].get(name) if self._before else None
        if old is not None and old.number == offer.number and not offer.standing:
            return None
        return min(1.0, max(0.0, offer.leaves))
