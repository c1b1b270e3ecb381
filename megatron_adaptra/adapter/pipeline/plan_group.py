"""Who has to run the same plan: the ranks that meet in collectives inside an op."""

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

    All of them run the order that `members[0]`, a first stage, decides for its own pipeline.
    `hosts[rank]`: the identity of each rank's machine; `stages[rank]`: its stage.
    `resumed`: what the leader brought from a checkpoint, if anything. `limits`: what some rank of
    them all cannot do, and why (see `session.Limits`). Ranks are global ones.
    """

    members: tuple[int, ...]
    hosts: tuple[str, ...]
    stages: tuple[int, ...]
    resumed: Any
    limits: dict[str, str]

    @property
    def me(self) -> int:
        """This rank's index in `members`."""
        return self.members.index(dist.get_rank())

    def leads(self, pipeline: Sequence[int]) -> bool:
        """Whether the leader is a stage of this pipeline."""
        return self.members[0] in pipeline


def gather(resumed: Any, limits: dict[str, str]) -> PlanGroup:
    """Learn where everybody is, and what everybody can do; a collective over all ranks."""
    mine = (_key(), machine(), mpu.get_pipeline_model_parallel_rank(), resumed, limits)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    members = tuple(rank for rank, (key, *_) in enumerate(everyone) if key == mine[0])
    hosts = tuple(host for _, host, _, _, _ in everyone)
    stages = tuple(stage for _, _, stage, _, _ in everyone)
    found: dict[str, str] = {}
    for *_, theirs in everyone:
        found.update({what: reason for what, reason in theirs.items() if reason})
    return PlanGroup(members, hosts, stages, everyone[members[0]][3], found)


def _key() -> int:
    """The same on all ranks of a block. Experts join the replicas: one block then."""
    if mpu.get_expert_model_parallel_world_size() > 1:
        return 0
    return int(mpu.get_data_parallel_rank())


def machine() -> str:
    """The same for two processes exactly if they share a kernel, and so a monotonic clock."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()
