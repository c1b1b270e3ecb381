"""Counts of microbatches that are found while training: one vote for all of a job's iterations."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_adaptra.adapter.pipeline.job_gather import from_all_ranks
from megatron_adaptra.config import AdaptraConfig
from megatron_adaptra.errors import BadInput, NoConnections
from megatron_adaptra.ir.sync import SyncPlan
from megatron_adaptra.runtime.offer import Offers
from megatron_adaptra.runtime.sync.connections import SyncConnections
from megatron_adaptra.runtime.sync.group import AdaptiveSync
from megatron_adaptra.runtime.sync.loop import SyncLoop


class FoundCounts:
    """Makes the sources of a job, which share one AdaptiveSync.

    `config`: the job's settings. `connections`: between all ranks. `replicas`: by rank, its own.
    `offers`: see SyncLoop.
    """

    def __init__(
        self,
        config: AdaptraConfig,
        connections: SyncConnections,
        replicas: list[int],
        offers: Offers | None = None,
    ) -> None:
        self._config, self._connections, self._replicas = config, connections, replicas
        self._offers = offers
        self._sync: AdaptiveSync | None = None

    @classmethod
    def connect(cls, config: AdaptraConfig, offers: Offers | None = None) -> FoundCounts | str:
        """For a job's settings, `config`, or why there is none; a collective of all ranks.

        `offers`: see SyncLoop.
        """
        replicas: list[int] = from_all_ranks(mpu.get_data_parallel_rank())
        try:
            connections = SyncConnections.between(
                dist.group.WORLD, config.timeout, config.transport, config.encrypt, from_all_ranks
            )
        except (BadInput, NoConnections) as error:
            return f"cannot connect to vote on them: {error}"
        return cls(config, connections, replicas, offers)

    def __call__(self, microbatches: int, iteration: int) -> FoundCountsSource:
        """For so many `microbatches` of a replica, from an `iteration` on."""
        if self._sync is None:
            config = self._config
            self._sync = AdaptiveSync(
                self._connections, dist.get_rank(), self._replicas, microbatches, iteration,
                stages=mpu.get_pipeline_model_parallel_world_size(), min_gain=config.min_gain,
                timeout=config.timeout, log=config.log_file("sync"),
                record=Path(config.record) / "sync.jsonl" if config.record else None,
                offers=self._offers,
            )  # fmt: skip
        return FoundCountsSource(self._sync, microbatches)

    @property
    def loop(self) -> SyncLoop | None:
        """What chooses, at the job's first rank; None at others."""
        return None if self._sync is None else self._sync.loop

    def close(self) -> None:
        """No iteration follows."""
        if self._sync is None:
            self._connections.close()
        else:
            self._sync.close()


class FoundCountsSource:
    """As Source, for so many `microbatches`: what all ranks of `sync` have agreed on."""

    def __init__(self, sync: AdaptiveSync, microbatches: int) -> None:
        self._sync, self._microbatches = sync, microbatches

    def begin(self, iteration: int) -> SyncPlan:
        """As for Source, at `iteration`. Raises Disagreement, as AdaptiveSync."""
        return self._sync.begin(iteration, self._microbatches)

    def starts(self, iteration: int) -> None:
        """As for Source, at `iteration`."""
        self._sync.starts(iteration)

    def ended(self, iteration: int, counts: tuple[int, ...], seconds: tuple[float, ...]) -> None:
        """As for Source: `iteration` has taken `seconds` for so many `counts`."""
        self._sync.ended(iteration, counts, seconds)

    def close(self) -> None:
        """Nothing: another number of microbatches has the same vote."""
