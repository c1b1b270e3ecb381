"""Groups with one plan each: a closed group's ranks, or all replicas if work moves between them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_adaptra.adapter.compat.closed_groups import Tie, components, own_ranks
from megatron_adaptra.adapter.limits import WARMUP
from megatron_adaptra.adapter.pipeline.job_gather import from_all_ranks
from megatron_adaptra.execute.process_location import ProcessLocation, clock_ids, visible_pids
from megatron_adaptra.transport.descriptors import descriptors_left, room, too_few

_serial = 0  # of the connections to come: a job may make some, and others when these are gone


@dataclass(frozen=True)
class PlanGroup:
    """A PlanGroup holds the pipelines with one plan: those of a closed group, or of all replicas.

    The ranks of a tensor-parallel group run the same op at the same time, so the pipelines of a
    replica need one plan. Replicas have plans of their own, unless ops meet ranks of other
    replicas, or a plan moves work between them.

    Args:
        members: global ranks. The first of them is the leader, a first stage, which plans with the
            reports of its own pipeline.
        clock_ids: of every global rank of the job, the identity of its machine's clock.
        stages: of every global rank, its stage.
        visible_pids: process ids, by global rank, of the processes that this one sees, itself
            included.
        resumed: the state that the leader has read from a checkpoint; None for none.
        limits: what some rank's model does not allow, with the reason (`limits`).
        serial: number of this group's connections in the job; the same on all ranks.
        left: of every global rank, the file descriptors left to it when connections and control
            have taken theirs; negative where they are too few.
        names: of every global rank, its host's name, for people.
        joined: why replicas of the job run the same order, or an empty string.
    """

    members: tuple[int, ...]
    clock_ids: tuple[str, ...]
    stages: tuple[int, ...]
    visible_pids: Mapping[int, int]
    resumed: Any
    limits: dict[str, str]
    serial: int = 0
    left: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    joined: str = ""

    @classmethod
    def gather(
        cls, resumed: Any, limits: dict[str, str], ties: Sequence[Tie] = (), together: bool = False
    ) -> PlanGroup:
        """Collect where each rank is, and what it can do; a collective over all ranks of the job.

        Args:
            resumed: what this rank has read from a checkpoint, or None; the leader's is kept.
            limits: of this rank's own model, the reason by feature; empty where there is none.
            ties: of this rank with ranks of other replicas.
            together: all replicas have one plan.

        Raises:
            PeerLost: without gloo, a rank has not come in `patience(waits.CONNECT)` seconds. Over
                gloo torch raises its own error, after the timeout of the default process group.
        """
        global _serial
        stage = mpu.get_pipeline_model_parallel_rank()
        mine = (
            (own_ranks(), list(ties)), ProcessLocation.here(), stage, resumed, limits, _serial,
            room(),
        )  # fmt: skip
        gathered = from_all_ranks(mine)
        tied, locations, stages, plans, all_limits, serials, rooms = zip(*gathered, strict=True)
        own, others = (list(itertools.chain(*kind)) for kind in zip(*tied, strict=True))
        beside, across = list[Tie](), list[Tie]()  # at one stage, or over stages
        for tie in others:
            (beside if len({stages[rank] for rank in tie.ranks}) == 1 else across).append(tie)
        keys, reasons = components(own, beside, len(gathered))
        joined = next(iter(reasons.values()), "")
        if joined and too_few(descriptors_left(keys, rooms)):  # none is planned for so many
            keys, _ = components(own, [], len(gathered))
            across, joined = [*across, Tie((), joined)], ""
        if together:
            keys = [0] * len(keys)
        key = keys[dist.get_rank()]
        members = tuple(rank for rank, other in enumerate(keys) if other == key)
        known = {k: why for found in all_limits for k, why in found.items() if why}
        if across:
            known[WARMUP] = across[0].why
        serial = max(serials)
        _serial = serial + 1
        left = descriptors_left(keys, rooms)
        return cls(
            members, tuple(clock_ids(locations)), stages, visible_pids(locations, dist.get_rank()),
            plans[members[0]], known, serial, left, tuple(where.host for where in locations),
            joined,
        )  # fmt: skip

    @property
    def leader(self) -> bool:
        """True where this rank leads the group."""
        return self.members.index(dist.get_rank()) == 0

    @property
    def alike(self) -> frozenset[int]:
        """The members at this rank's stage, which run the same ops in the same order."""
        stage = self.stages[dist.get_rank()]
        return frozenset(rank for rank in self.members if self.stages[rank] == stage)

    def leads(self, pipeline: Sequence[int]) -> bool:
        """Return whether the leader is a stage of `pipeline`, which is given as global ranks."""
        return self.members[0] in pipeline
