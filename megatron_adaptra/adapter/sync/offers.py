"""What cheaper remedies for slow replicas this job allows, and who plans them (`auto`).

Their planners run at rank 0, as what chooses counts does: that of routes for all replicas, those of
all-reduces for the groups that rank 0 is the first of. The first stage's group stands for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_adaptra.adapter.pipeline.session import Session
from megatron_adaptra.config import AUTO
from megatron_adaptra.plan.ladder import COLLECTIVE, ROUTES
from megatron_adaptra.runtime.offer import Offer, Offers
from megatron_adaptra.runtime.replica_loop import ReplicaLoop
from megatron_adaptra.runtime.replica_replanner import ALIKE, NO_ROUTES


def offers_of(session: Session, reductions: Callable[[], Sequence[Any]]) -> Offers | None:
    """By remedy that the job's settings allow, what asks its planner; None for `share`.

    `session`: this rank's. `reductions`: the job's PlannedCollectives.
    """
    config = session.config
    if config.sync != "auto":
        return None
    offers: dict[str, Callable[[], Offer | None]] = {}
    if config.allreduce == AUTO:
        offers[COLLECTIVE] = lambda: _of_all_reduces(reductions())
    if session.context.replicas > 1:
        offers[ROUTES] = lambda: _of_routes(session)
    return offers


def _of_all_reduces(reductions: Sequence[Any]) -> Offer | None:
    """The best offer; None until some planner has made one."""
    made = [loop.offer for one in reductions for loop in one.loops if loop.offer is not None]
    return min(made, key=lambda offer: offer.leaves, default=None)


def _of_routes(session: Session) -> Offer | None:
    run = session.run
    loop = None if run is None else getattr(run.controller, "loop", None)
    if not isinstance(loop, ReplicaLoop):
        return None
    if loop.replanner.mode in (ALIKE, NO_ROUTES):
        return Offer(0, 1.0, standing=True)
    return loop.replanner.offer
