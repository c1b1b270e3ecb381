"""Remedies for a slow replica that are cheaper than shares, and the seconds that they would leave.

Under `share` a figure is the least that any such plan takes, so that a reader can judge the
decision. Under `auto` the cheapest remedy that is enough is taken (plan/ladder.py). The seconds
that a cheaper one leaves are those that its planner offers; before that, its lower bound; and, once
it has had PATIENCE iterations to act, the measured ones.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence

from megatron_adaptra.adapt.loop import Offer, Offers
from megatron_adaptra.plan.ladder import (
    BY_COUNTS,
    COLLECTIVE,
    ONE_STAGE,
    ONLY_COMMUNICATION,
    ONLY_WAITING,
    ORDER,
    ROUTES,
    SHARES,
    Remedy,
)
from megatron_adaptra.plan.shares.counts import SharePlan, Speed

RECENT = 10  # iterations within which all planners notice the same change
PATIENCE = 24  # iterations that cheaper remedies have to act, before what they leave is measured


class Offered:
    """A reader of `offers` returns those that answer the last change, and no older ones.

    `shows`: what they leave shows in iterations, as ranks act; an attribute, too.
    """

    shows = True

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


def cheaper_remedies(
    speeds: Sequence[Speed], microbatches: int, step: float, stages: int
) -> tuple[Remedy, ...]:
    """Return the remedies that are cheaper than shares of microbatches, the cheapest first.

    Args:
        speeds: by replica.
        microbatches: of a replica in stock.
        step: seconds of an iteration after the last replica has run its microbatches.
        stages: of each replica's pipeline.
    """
    computes = max(microbatches * speed.per_microbatch for speed in speeds)
    arrives = max(speed.seconds(microbatches) for speed in speeds)
    if stages > 1:
        slack = computes + step, ONLY_WAITING
        routes = None, "it is not used together with shares of microbatches"
    else:
        slack = arrives + step, ONE_STAGE
        routes = None, "it needs at least 2 stages"
    return (
        Remedy(ORDER, *slack),
        Remedy(COLLECTIVE, arrives, ONLY_COMMUNICATION),
        Remedy(ROUTES, *routes),
    )


def known_remedies(
    share: SharePlan, with_shares: float, offered: Offered, measured: bool
) -> tuple[list[Remedy], set[str]]:
    """Return all rungs of the ladder under `auto`, the cheapest first.

    Beside them, the names of those that leave as many seconds or more.

    Args:
        share: the best counts, where a replica is slow; its `full` is what iterations take as they
            are, whatever is in force.
        with_shares: seconds of an iteration with these counts.
        offered: by the planners of the remedies that are allowed.
        measured: these have had the time to act.
    """
    full, replicas = share.full, share.sync.replicas
    # A late rank's part has to cross its port once; a ring sends it 2 (N - 1) / N times.
    hidden = share.step * (replicas - 2) / (2 * (replicas - 1)) if replicas > 1 else 0.0
    least = {COLLECTIVE: full - hidden, ROUTES: min(share.bound, full)}
    found = [Remedy(ORDER, full, "each pipeline has a plan of its own already")]
    uncertain = set[str]()
    for name, bound in least.items():
        if name not in offered.names:
            found.append(Remedy(name, None, "not allowed, or not possible here"))
        elif measured and (offered.shows or offered.leaves(name) is None):
            found.append(Remedy(name, full, "measured, with what of it is in force"))
        elif (leaves := offered.leaves(name)) is not None:
            found.append(Remedy(name, leaves * full, "as its planner expects"))
        else:
            found.append(Remedy(name, bound, "no less; not planned yet"))
            uncertain.add(name)
    found.append(Remedy(SHARES, with_shares, BY_COUNTS))
    return found, uncertain
