"""Emulation on this rank: slow links and paths of its worker, and slow ops."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import torch
from megatron.core import parallel_state as mpu

from megatron_adaptra.agree.guard import Guard
from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.config import AdaptraConfig
from megatron_adaptra.device.base import Device
from megatron_adaptra.emulate import worker_rules
from megatron_adaptra.emulate.links import LinkEmulator
from megatron_adaptra.emulate.rules import in_replica
from megatron_adaptra.emulate.scenario import load_rules
from megatron_adaptra.emulate.worker_emulator import WorkerEmulator
from megatron_adaptra.execute.guarded_probe import GuardedProbe, SlowedProbe


class Emulation(NamedTuple):
    """An emulation slows a rank: `links` its messages, `worker` its ops; None without a rule."""

    links: LinkEmulator | None
    worker: WorkerEmulator | None

    @classmethod
    def of_rank(
        cls, config: AdaptraConfig, stage: int, stages: int, together: bool = False
    ) -> Emulation:
        """Make the emulation that the `config` asks for at this `stage` of so many `stages`.

        `together`: see `emulated_links`. Raises BadInput for an unusable rule, and for slow workers
        where there can be none.
        """
        on_gpu = torch.device(torch.cuda.current_device()).type == "cuda"
        if config.emulate_worker and (why := worker_rules.why_no_slowness(on_gpu)):
            raise BadInput(worker_rules.FIELD, ", ".join(config.emulate_worker), why)
        links = emulated_links(config, stage, stages, together)
        replica, replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        slow = worker_rules.load_slowness(config.emulate_worker, stages, replicas)
        always = {one.worker for one in slow if one.times > 1 and one.first <= 0 and one.end == inf}
        steady = always == set(range(replicas * stages))
        worker = replica * stages + stage
        return cls(links, WorkerEmulator(worker, slow, steady) if slow else None)

    def probe(self, guard: Guard, worker: int, device: Device) -> GuardedProbe:
        """Make the probe of a `worker` with this `guard` and `device`."""
        if self.worker is not None and self.worker.rules:
            return SlowedProbe(guard, worker, device, self.worker)
        return GuardedProbe(guard, worker, device)


def emulated_links(
    config: AdaptraConfig, stage: int, stages: int, together: bool = False
) -> LinkEmulator | None:
    """Make the emulator of this rank's links by the `config`, at this `stage` of so many `stages`.

    The links are those of its replica's own pipeline, between stages; where replicas are planned
    `together`, those to all workers, between workers. None without a rule. Megatron's groups exist.
    Raises BadInput for an unusable rule.
    """
    replica, replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    rules = load_rules(config.emulate_link, stages, replicas=replicas)
    if not rules:
        return None
    if together:
        return LinkEmulator(replica * stages + stage, rules)
    return LinkEmulator(stage, in_replica(rules, replica, stages))
