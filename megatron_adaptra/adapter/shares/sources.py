"""Where a training's sync plans come from: counts that are named, or a vote that finds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_adaptra.adapt.leader import planner_of
from megatron_adaptra.adapt.loop import Offer, Offers
from megatron_adaptra.adapt.routes.remedy import ALIKE, NO_ROUTES, RouteRemedy
from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.config import AUTO
from megatron_adaptra.diagnose.finding import Place
from megatron_adaptra.diagnose.replicas import ReplicaDiagnosis
from megatron_adaptra.execute.shares.adaptive import AdaptiveShares
from megatron_adaptra.ir.sync import SyncPlan, check_counts
from megatron_adaptra.measure.host_use import HostUse
from megatron_adaptra.measure.replica_speed import ReplicaRow
from megatron_adaptra.plan.ladder import COLLECTIVE, ROUTES

if TYPE_CHECKING:  # settings are checked before it is known that this Megatron has all it needs
    from megatron_adaptra.adapter.pipeline.session import Session
    from megatron_adaptra.adapter.pipeline.wiring import RankContext


class NamedCounts:
    """Named counts are the same all the time, where they share out an iteration's microbatches.

    They have the methods of AdaptiveShares.

    Args:
        counts: by replica.
        say: logs a sentence, at rank 0.
    """

    def __init__(self, counts: tuple[int, ...], say: Callable[[str], None]) -> None:
        self._counts, self._say = counts, say
        self._plan: SyncPlan | None = None

    def begin(self, iteration: int, voted: tuple[int, ...] | None, microbatches: int) -> SyncPlan:
        """Return the plan of an `iteration` of so many `microbatches`; nothing is `voted` on."""
        if self._plan is None or self._plan.microbatches != microbatches:
            self._plan = self._of(microbatches)
        return self._plan

    def _of(self, microbatches: int) -> SyncPlan:
        replicas = mpu.get_data_parallel_world_size()
        try:
            fit(self._counts, replicas, microbatches)
        except BadInput as error:  # while a batch size ramps up, or where nobody has checked them
            self._say(f"replicas run {microbatches} microbatches each: {error}")
            return SyncPlan.full_of(replicas, microbatches)
        return SyncPlan(microbatches, self._counts)

    def gives(self, iteration: int) -> tuple[HostUse | None, tuple[int, ...] | None]:
        """Add nothing to the vote at the end of `iteration`."""
        return None, None

    def starts(self, iteration: int) -> None:
        """Do nothing when all ranks start `iteration`."""

    def ended(self, row: ReplicaRow) -> None:
        """Leave the `row` of an iteration alone."""

    def close(self) -> None:
        """Do nothing: there is nothing to end."""


# Decides, together with those of all other ranks, what each replica runs. A plan that `begin`
# returns on one rank it returns on all, for the same iteration: their votes compare it, and where
# it differs all replicas run as stock from then on.
Source = NamedCounts | AdaptiveShares


def new_source(
    session: Session,
    microbatches: int,
    iteration: int,
    reductions: Callable[[], Sequence[Any]],
    places: Sequence[Place],
) -> Source:
    """Make the source that a job's settings ask for.

    Args:
        session: this rank's.
        microbatches: of a replica in stock.
        iteration: the first one.
        reductions: the job's PlannedCollectives.
        places: of all ranks.
    """
    config = session.config
    if config.counts:
        return NamedCounts(config.counts, session.context.say)
    return AdaptiveShares(
        dist.get_rank(), mpu.get_data_parallel_world_size(), microbatches, iteration,
        stages=mpu.get_pipeline_model_parallel_world_size(), min_gain=config.min_gain,
        log=config.log_file("sync"),
        record=Path(config.record) / "sync.jsonl" if config.record else None,
        offers=_offers(session, reductions), acts=session.context.acts,
        diagnosis=_diagnosis(session.context, places),
    )  # fmt: skip


def _diagnosis(context: RankContext, places: Sequence[Place]) -> ReplicaDiagnosis | None:
    if dist.get_rank():
        return None
    workers = {place.worker: place for place in reversed(places)}  # of each its first rank
    replicas: dict[int, list[Place]] = {}
    for place in sorted(workers.values(), key=lambda place: place.stage):
        replicas.setdefault(int(place.worker.partition(".")[0]), []).append(place)
    each = [tuple(replicas[replica]) for replica in sorted(replicas)]
    return ReplicaDiagnosis(each, context.job_log.new_book(), context.job_log.open.explains)


def _offers(session: Session, reductions: Callable[[], Sequence[Any]]) -> Offers | None:
    """Return, by cheaper remedy that settings allow, a function that asks its planner.

    None for `share`. Planners run at rank 0, where counts are chosen: that of routes for all
    replicas, those of all-reduces for the groups that rank 0 is the first of. The first stage's
    group stands for all.
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


def fit(counts: tuple[int, ...], replicas: int, microbatches: int) -> None:
    """Raise BadInput unless `counts` share out the microbatches of so many `replicas`.

    `microbatches`: of each replica in stock.
    """
    field, given = "--adaptra-sync-counts", ",".join(map(str, counts))
    if len(counts) != replicas:
        words = f"there are {replicas} replicas" if replicas > 1 else "there is 1 replica"
        raise BadInput(field, given, f"{words}: name a count for each")
    total = replicas * microbatches
    if sum(counts) != total:
        allowed = (
            f"they have to add up to the global batch, {total} microbatches "
            f"({replicas} x {microbatches}), not to {sum(counts)}"
        )
        raise BadInput(field, given, allowed)
    check_counts(microbatches, counts)
