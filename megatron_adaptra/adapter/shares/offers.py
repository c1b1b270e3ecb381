"""Cheaper remedies for slow replicas that this job allows, and their planners (`auto`).

The planners run at rank 0, where counts are chosen: that of routes for all replicas, those of
all-reduces for the groups that rank 0 is the first of. The first stage's group stands for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_adaptra.adapt.leader import planner_of
from megatron_adaptra.adapt.loop import Offer, Offers
from megatron_adaptra.adapt.routes.remedy import ALIKE, NO_ROUTES, RouteRemedy
from megatron_adaptra.adapter.pipeline.session import Session
from megatron_adaptra.config import AUTO
from megatron_adaptra.plan.ladder import COLLECTIVE, ROUTES


def offers_of(session: Session, reductions: Callable[[], Sequence[Any]]) -> Offers | None:
    """Return, by remedy that settings allow, a function that asks its planner; None for `share`.

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
    """Return the best offer; None until some planner has made one."""
    offers = [loop.remedy.offer for one in reductions for loop in one.loops]
    made = [offer for offer in offers if offer is not None]
    return min(made, key=lambda offer: offer.leaves, default=None)


def _of_routes(session: Session) -> Offer | None:
    run = session.run
    remedy = None if run is None else planner_of(run.controller)
    if not isinstance(remedy, RouteRemedy):
        return None
    if remedy.mode in (ALIKE, NO_ROUTES):
        return Offer(0, 1.0, standing=True)
    return remedy.offer
