"""What of this rank is emulated: slow links and paths of its worker, and slow ops."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import torch
from megatron.core import parallel_state as mpu

from megatron_adaptra.config import AdaptraConfig
from megatron_adaptra.device.base import Device
from megatron_adaptra.errors import BadInput
from megatron_adaptra.runtime import worker_rules
from megatron_adaptra.runtime.guard import Guard
from megatron_adaptra.runtime.guarded_probe import GuardedProbe
from megatron_adaptra.runtime.worker_emulator import SlowedProbe, WorkerEmulator
from megatron_adaptra.transport.emulate import LinkEmulator
from megatron_adaptra.transport.rules import in_replica
from megatron_adaptra.transport.scenario import load_rules


class Emulation(NamedTuple):
    """`links`: delays messages, `worker`: delays ops; None where the job has no rule for such."""

    links: LinkEmulator | None
    worker: WorkerEmulator | None

    @classmethod
    def of_rank(
        cls, config: AdaptraConfig, stage: int, stages: int, together: bool = False
    ) -> Emulation:
        """What the `config` asks for of this rank's worker: this `stage` of so many `stages`.

        The links are those of its replica's own pipeline, between stages; where replicas are
        planned `together`, those to all workers, between workers. Megatron's groups exist. Raises
        BadInput for an unusable rule, and for slow workers where there can be none.
        """
        on_gpu = torch.device(torch.cuda.current_device()).type == "cuda"
        if config.emulate_worker and (why := worker_rules.why_no_slowness(on_gpu)):
            raise BadInput(worker_rules.FIELD, ", ".join(config.emulate_worker), why)
        replica, replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        links = load_rules(config.emulate_link, stages, replicas=replicas)
        slow = worker_rules.load_slowness(config.emulate_worker, stages, replicas)
        worker = replica * stages + stage
        emulator = None
        if links and together:
            emulator = LinkEmulator(worker, links)
        elif links:
            emulator = LinkEmulator(stage, in_replica(links, replica, stages))
        always = {one.worker for one in slow if one.times > 1 and one.first <= 0 and one.end == inf}
        steady = always == set(range(replicas * stages))
        return cls(emulator, WorkerEmulator(worker, slow, steady) if slow else None)

    def probe(self, guard: Guard, stage: int, device: Device) -> GuardedProbe:
        """The probe of a rank at this `stage`, with this `guard` and `device`."""
        if self.worker is not None and self.worker.rules:
            return SlowedProbe(guard, stage, device, self.worker)
        return GuardedProbe(guard, stage, device)
