"""Gradients of data-parallel ranks, reduced by a collective plan in place of Megatron's all-reduce.

This covers plain DDP: dense parameters over all data-parallel ranks, and experts over the ranks
that have the same ones. For the distributed optimizer see sharded_gradients.py.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from megatron_adaptra.adapter.compat.patch_attr import find
from megatron_adaptra.adapter.compat.patches import PATCHES, patch
from megatron_adaptra.adapter.step.planned_collectives import Handle, PlannedCollectives
from megatron_adaptra.ir.collective import Goal

_WHAT = "gradients are reduced"


class GradientReduction(PlannedCollectives):
    """A GradientReduction plans the all-reduces in `start_grad_sync`; see PlannedCollectives."""

    def _patch(self) -> ExitStack:
        (target,) = PATCHES["gradients"].targets
        start = getattr(*find(target))

        def start_grad_sync(buckets: Any, *args: Any, **kwargs: Any) -> None:
            native = partial(start, buckets, *args, **kwargs)
            if not self.active or buckets.ddp_config.use_distributed_optimizer:
                native()
                return
            data = (bucket.grad_data for bucket in buckets.buckets)
            planned = self._planned(
                Goal.ALL_REDUCE, _WHAT, buckets.data_parallel_group, buckets, data
            )
            hand_over(buckets, self._run(native, buckets, {Goal.ALL_REDUCE: planned}))

        return patch("gradients", start_grad_sync=start_grad_sync)


def hand_over(buckets: Any, handle: Handle | None) -> None:
    """Give the `handle` of a reduction to Megatron if it is to overlap, or wait for it.

    Args:
        buckets: that are reduced.
        handle: None where nothing was begun by plan.

    Raises:
        PeerLost, Disagreement: as `Handle.wait`.
    """
    if handle is None:
        return
    if buckets.grad_reduce_handle is not None:
        buckets.grad_reduce_handle = handle  # Megatron's own, of nothing, was there
    else:
        handle.wait()
