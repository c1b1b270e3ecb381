"""Who has to run the same plan: the ranks that are together in collectives inside an op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_adaptra.adapter.pipeline.job_gather import from_all_ranks
from megatron_adaptra.runtime.machines import Place, clocks, neighbours
from megatron_adaptra.transport.descriptors import descriptors_left, room

_serial = 0  # of the connections to come: a job may make some, and others when these are gone


@dataclass(frozen=True)
class PlanGroup:
    """The pipelines of one data-parallel replica: one per tensor- and context-parallel rank.

    The ranks of a tensor-parallel group run the same op at the same time, so all these pipelines
    need one plan. Replicas have plans of their own, unless experts join them.

    `members`: global ranks; the leader is the first of them, a first stage, and plans with the
    reports of its own pipeline. `hosts[rank]`, `stages[rank]`: of every global rank, the identity
    of its machine and its stage; `names[rank]`, its host's name. `neighbours`: the processes that
    this one sees, by global rank. `resumed`: what the leader brought from a checkpoint, or None.
    `limits`: what some rank's model does not allow, and why (`compatibility.limits_of`).
    `serial`: of this group's connections, the same on all ranks. `left[rank]`: of every global
    rank, the descriptors left to it when connections and control have taken theirs.
    """

    members: tuple[int, ...]
    hosts: tuple[str, ...]
    stages: tuple[int, ...]
    neighbours: Mapping[int, int]
    resumed: Any
    limits: dict[str, str]
    serial: int = 0
    left: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    @classmethod
    def gather(cls, resumed: Any, limits: dict[str, str]) -> PlanGroup:
        """Learn where each rank is, and what it can do; a collective over all ranks.

        `resumed` and `limits` are this rank's own.
        """
        global _serial
        key, stage = _group_key(), mpu.get_pipeline_model_parallel_rank()
        mine = (key, Place.here(), stage, resumed, limits, _serial, room())
        gathered = from_all_ranks(mine)
        keys, places, stages, plans, all_limits, serials, rooms = zip(*gathered, strict=True)
        members = tuple(rank for rank, other in enumerate(keys) if other == key)
        known = {k: why for found in all_limits for k, why in found.items() if why}
        serial = max(serials)
        _serial = serial + 1
        left = descriptors_left(keys, rooms)
        return cls(
            members, tuple(clocks(places)), stages, neighbours(places, dist.get_rank()),
            plans[members[0]], known, serial, left, tuple(place.host for place in places),
        )  # fmt: skip

    @property
    def leader(self) -> bool:
        """Whether this rank leads the group."""
        return self.members.index(dist.get_rank()) == 0

    def leads(self, pipeline: Sequence[int]) -> bool:
        """Whether the leader is a stage of `pipeline`, which is given as global ranks."""
        return self.members[0] in pipeline


def _group_key() -> int:
    """The same on all ranks of a plan group. Experts join the replicas: one group then."""
    if mpu.get_expert_model_parallel_world_size() > 1:
        return 0
    return int(mpu.get_data_parallel_rank())
