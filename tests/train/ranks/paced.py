"""Counts that are found in the same iterations on any machine, for scripts of this folder."""

from __future__ import annotations

import torch.distributed as dist

from megatron_adaptra.execute.shares.adaptive import AdaptiveShares
from megatron_adaptra.ir.sync import SyncPlan

PATIENCE = 60.0  # seconds


def pace() -> None:
    """From now on rank 0 ends an iteration when what it can know by then is dealt with."""
    if dist.get_rank():
        return
    begin = AdaptiveShares.begin

    def paced(
        self: AdaptiveShares, iteration: int, voted: tuple[int, ...] | None, microbatches: int
    ) -> SyncPlan:
        assert self.loop is not None
        self.loop.drain(PATIENCE)
        return begin(self, iteration, voted, microbatches)

    AdaptiveShares.begin = paced  # type: ignore[method-assign]
