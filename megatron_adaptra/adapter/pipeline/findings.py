"""Findings of a job: the diagnosis of each leader, and the comparison of replicas at rank 0."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_adaptra.agree.job_log import JobLog
from megatron_adaptra.diagnose.across import Across, Shown
from megatron_adaptra.diagnose.finding import Place, Worker
from megatron_adaptra.diagnose.pipeline import PipelineDiagnosis


def diagnosis_of(
    log: JobLog,
    workers: Sequence[int],
    stages: int,
    names: Sequence[str],
    replica: int | None,
    compares: bool,
) -> PipelineDiagnosis:
    """Make the diagnosis of a leader.

    Args:
        log: of this rank.
        workers: global ranks of all that report to it.
        stages: of a replica.
        names: hosts of all ranks.
        replica: this rank's in the job; None where one plan is for all replicas.
        compares: rank 0 compares it with other replicas; each of these has a leader, too.
    """
    replicas = len(workers) // stages
    shown = None
    if replica is not None and compares:
        if dist.get_rank() == 0:
            places = [
                tuple(
                    Place(stage, rank + apart, names[rank + apart], "", f"{number}.{stage}")
                    for stage, rank in enumerate(workers)
                )
                for number, apart in enumerate(replica_distances())
            ]
            log.each_look = Across(places, log.new_book(), log.shown).look
        # Tensor and context ranks of a stage wait for each other in each layer: one stands for all.
        if dist.get_rank() + replica_distances()[0] == 0:
            shown = Shown(replica, mpu.get_data_parallel_world_size(), log.show).add
    known = [Worker(rank, names[rank]) for rank in workers]
    return PipelineDiagnosis(known, replicas, 0 if replicas > 1 else replica, log.new_book(), shown)


def replica_distances() -> list[int]:
    """Return the distances, in global ranks, to the same stage of each replica.

    Megatron's grid of ranks is regular: in each dimension neighbours are equally far apart.
    """
    me, group = dist.get_rank(), mpu.get_data_parallel_group()
    return [rank - me for rank in dist.get_process_group_ranks(group)]
