"""Counts of microbatches that are found while training: one AdaptiveSync for all iterations."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_adaptra.config import AdaptraConfig
from megatron_adaptra.ir.sync import SyncPlan
from megatron_adaptra.runtime.loop import Loop
from megatron_adaptra.runtime.offer import Offers
from megatron_adaptra.runtime.sync.group import AdaptiveSync
from megatron_adaptra.runtime.sync.loop import ShareRemedy
from megatron_adaptra.telemetry.host_use import HostUse
from megatron_adaptra.telemetry.replica_row import ReplicaRow


class FoundCounts:
    """Makes the sources of a job, which share one AdaptiveSync.

    `config`: the job's settings. `offers`: see ShareRemedy.
    """

    def __init__(self, config: AdaptraConfig, offers: Offers | None = None) -> None:
        self._config, self._offers = config, offers
        self._sync: AdaptiveSync | None = None

    def __call__(self, microbatches: int, iteration: int) -> FoundCountsSource:
        """For so many `microbatches` of a replica, from an `iteration` on."""
        if self._sync is None:
            config = self._config
            self._sync = AdaptiveSync(
                dist.get_rank(), mpu.get_data_parallel_world_size(), microbatches, iteration,
                stages=mpu.get_pipeline_model_parallel_world_size(), min_gain=config.min_gain,
                log=config.log_file("sync"),
                record=Path(config.record) / "sync.jsonl" if config.record else None,
                offers=self._offers,
            )  # fmt: skip
        return FoundCountsSource(self._sync, microbatches)

    @property
    def loop(self) -> Loop[ShareRemedy] | None:
        """What chooses, at the job's first rank; None at others."""
        return None if self._sync is None else self._sync.loop

    def close(self) -> None:
        """No iteration follows."""
        if self._sync is not None:
            self._sync.close()


class FoundCountsSource:
    """As Source, for so many `microbatches`: what all ranks of `sync` have voted on."""

    def __init__(self, sync: AdaptiveSync, microbatches: int) -> None:
        self._sync, self._microbatches = sync, microbatches

    def begin(self, iteration: int, voted: tuple[int, ...] | None) -> SyncPlan:
        """As for Source, at `iteration`, with what was `voted` on."""
        return self._sync.begin(iteration, voted, self._microbatches)

    def gives(self, iteration: int) -> tuple[HostUse | None, tuple[int, ...] | None]:
        """As for Source, at the end of `iteration`."""
        return self._sync.gives(iteration)

    def starts(self, iteration: int) -> None:
        """As for Source, at `iteration`."""
        self._sync.starts(iteration)

    def ended(self, row: ReplicaRow) -> None:
        """As for Source, with its `row`."""
        self._sync.ended(row)

    def close(self) -> None:
        """Nothing: another number of microbatches has the same vote."""
