"""Counts that are found in the same iterations on any machine, for scripts of this folder."""

from __future__ import annotations

import torch.distributed as dist

from megatron_adaptra.adapter.sync.found_counts import FoundCountsSource
from megatron_adaptra.ir.sync import SyncPlan

PATIENCE = 60.0  # seconds


def pace() -> None:
    """From now on rank 0 ends an iteration when what it can know by then is dealt with."""
    if dist.get_rank():
        return
    begin = FoundCountsSource.begin

    def paced(self: FoundCountsSource, iteration: int, voted: tuple[int, ...] | None) -> SyncPlan:
        assert self._sync.loop is not None
        self._sync.loop.drain(PATIENCE)
        return begin(self, iteration, voted)

    FoundCountsSource.begin = paced  # type: ignore[method-assign]
