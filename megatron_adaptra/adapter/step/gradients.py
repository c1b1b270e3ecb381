"""Megatron's collectives of gradients and of parameters, by plans.

Plain DDP all-reduces gradients: of dense parameters over all data-parallel ranks, and of experts
over the ranks that have the same ones. The distributed optimizer has a reduce-scatter of gradients
and an all-gather of parameters; shards stay Megatron's. Where it has several instances, each of
which has all shards, an all-reduce adds up what the instances have of each shard; it goes by a plan
of its own.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch.distributed as dist

from megatron_adaptra.adapter.compat.patch_attr import find
from megatron_adaptra.adapter.compat.patches import PATCHES, patch
from megatron_adaptra.adapter.step.planned_collectives import Handle, PlannedCollectives
from megatron_adaptra.adapter.step.planned_groups import PlannedGroup
from megatron_adaptra.ir.collective import Goal

_WHAT = {
    Goal.REDUCE_SCATTER: "gradients are reduced",
    Goal.ALL_GATHER: "parameters are gathered",
    Goal.ALL_REDUCE: "gradients are reduced between optimizer instances",
}


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
                Goal.ALL_REDUCE, "gradients are reduced", buckets.data_parallel_group, buckets, data
            )
            self._run(native, buckets, {Goal.ALL_REDUCE: planned})

        return patch("gradients", start_grad_sync=start_grad_sync)


class ShardedReduction(PlannedCollectives):
    """A ShardedReduction plans collectives of shards, on top of a GradientReduction, if any."""

    def _patch(self) -> ExitStack:
        reduce, gather, scatter_all, gather_all = (
            getattr(*find(target)) for target in PATCHES["shards"].targets
        )

        def start_grad_sync(buckets: Any, *args: Any, **kwargs: Any) -> None:
            native = partial(reduce, buckets, *args, **kwargs)
            if not self._is_ours(buckets):
                native()
                return
            groups = {
                Goal.REDUCE_SCATTER: self._in_instance(Goal.REDUCE_SCATTER, buckets),
                Goal.ALL_REDUCE: self._between_instances(buckets),
            }
            self._run(native, buckets, groups)

        def start_param_sync(buckets: Any, *args: Any, **kwargs: Any) -> None:
            native = partial(gather, buckets, *args, **kwargs)
            if not self._is_ours(buckets):
                native()
                return
            group = self._in_instance(Goal.ALL_GATHER, buckets)
            self._run(native, buckets, {Goal.ALL_GATHER: group})
            waited = buckets.param_gather_handle
            if waited is not None and group is not None and group.adaptive is not None:
                buckets.param_gather_handle = Handle([waited], hidden=group.adaptive.hidden)

        def reduce_scatter(shard: Any, whole: Any, *args: Any, **kwargs: Any) -> Any:
            op, group = kwargs.get("op", dist.ReduceOp.SUM), kwargs.get("group")
            if self._begun(Goal.REDUCE_SCATTER, whole, op, group):
                return None
            return scatter_all(shard, whole, *args, **kwargs)

        def all_gather(whole: Any, shard: Any, *args: Any, **kwargs: Any) -> Any:
            if self._begun(Goal.ALL_GATHER, whole, dist.ReduceOp.SUM, kwargs.get("group")):
                return None
            return gather_all(whole, shard, *args, **kwargs)

        return patch(
            "shards",
            start_grad_sync=start_grad_sync,
            start_param_sync=start_param_sync,
            dist_reduce_scatter_func=reduce_scatter,
            dist_all_gather_func=all_gather,
        )

    def _is_ours(self, buckets: Any) -> bool:
        return self.active and bool(buckets.ddp_config.use_distributed_optimizer)

    def _in_instance(self, goal: Goal, buckets: Any) -> PlannedGroup | None:
        """Find the group that reduces or gathers shards by plan; None where Megatron does."""
        reduces = goal is Goal.REDUCE_SCATTER
        data = (one.grad_data if reduces else one.param_data for one in buckets.buckets)
        group = buckets.intra_distributed_optimizer_instance_group
        return self._planned(goal, _WHAT[goal], group, buckets, data)

    def _between_instances(self, buckets: Any) -> PlannedGroup | None:
        """Find the group that adds up shards between instances; None for one, or without a plan."""
        if buckets.ddp_config.num_distributed_optimizer_instances == 1:
            return None
        goal, data = Goal.ALL_REDUCE, (one.grad_data for one in buckets.buckets)
        within = buckets.intra_distributed_optimizer_instance_group
        group = buckets.inter_distributed_optimizer_instance_group
        return self._planned(goal, _WHAT[goal], group, buckets, data, within)
