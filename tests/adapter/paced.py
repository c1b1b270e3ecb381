"""Counts that are found in the same iterations on any machine, for scripts of this folder."""

from __future__ import annotations

import time

import torch.distributed as dist

from megatron_adaptra.adapter.sync.found_counts import FoundCountsSource
from megatron_adaptra.ir.sync import SyncPlan
from megatron_adaptra.runtime.leader import Leader

PATIENCE = 60.0  # seconds


def pace() -> None:
    """From now on rank 0 begins an iteration when what it can know is dealt with, and voted on.

    That is the iteration before the last one: see ScheduleTimes.
    """
    if dist.get_rank():
        return
    begin = FoundCountsSource.begin

    def paced(self: FoundCountsSource, iteration: int) -> SyncPlan:
        loop, leader = self._sync.loop, self._sync._controller
        assert loop is not None
        assert isinstance(leader, Leader)
        end = time.monotonic() + PATIENCE
        while iteration > leader.first + 1 and time.monotonic() < end:
            loop.drain(PATIENCE)
            proposal = leader._open
            if loop.seen >= iteration - 2 and (proposal is None or proposal.committed is not None):
                break
            time.sleep(1e-3)
        return begin(self, iteration)

    FoundCountsSource.begin = paced  # type: ignore[method-assign]
