"""Who has to run the same plan: the ranks that are together in collectives inside an op."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as mpu


@dataclass(frozen=True)
class PlanGroup:
    """The pipelines of one data-parallel replica: one per tensor- and context-parallel rank.

    The ranks of a tensor-parallel group run the same op at the same time, so all these pipelines
    need one plan. Replicas have plans of their own, unless experts join them.

    `members`: global ranks; the leader is the first of them, a first stage, and plans with the
    reports of its own pipeline. `hosts[rank]`, `stages[rank]`: of every global rank, the identity
    of its machine and its stage. `resumed`: what the leader brought from a checkpoint, or None.
    `limits`: what some rank's model does not allow, and why (`compatibility.limits_of`).
    """

    members: tuple[int, ...]
    hosts: tuple[str, ...]
    stages: tuple[int, ...]
    resumed: dict[str, Any] | None
    limits: dict[str, str]

    @classmethod
    def gather(cls, resumed: dict[str, Any] | None, limits: dict[str, str]) -> PlanGroup:
        """Learn where everybody is, and what everybody can do; a collective over all ranks.

        `resumed` and `limits` are this rank's own.
        """
        mine = (_group_key(), host_id(), mpu.get_pipeline_model_parallel_rank(), resumed, limits)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        keys, hosts, stages, plans, all_limits = zip(*everyone, strict=True)
        members = tuple(rank for rank, key in enumerate(keys) if key == mine[0])
        known = {k: why for found in all_limits for k, why in found.items() if why}
        return cls(members, hosts, stages, plans[members[0]], known)

    @property
    def leader(self) -> bool:
        """Whether this rank leads the group."""
        return self.members.index(dist.get_rank()) == 0

    def leads(self, pipeline: Sequence[int]) -> bool:
        """Whether the leader is a stage of `pipeline`, which is given as global ranks."""
        return self.members[0] in pipeline


def host_id() -> str:
    """The same for two processes exactly if they share a kernel, and so a monotonic clock."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _group_key() -> int:
    """The same on all ranks of a plan group. Experts join the replicas: one group then."""
    if mpu.get_expert_model_parallel_world_size() > 1:
        return 0
    return int(mpu.get_data_parallel_rank())
