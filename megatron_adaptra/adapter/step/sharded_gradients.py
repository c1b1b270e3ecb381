"""The distributed optimizer's reduce-scatter of gradients and all-gather of parameters, by plans.

Shards stay Megatron's, and so does all around the two collectives: its own functions run, with our
exchange in place of the calls of torch.distributed in them, and our handle for what overlaps with
a forward or backward. What is not handled is left to Megatron, which is logged once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from megatron_adaptra.adapter.compat.patch_attr import find
from megatron_adaptra.adapter.compat.patches import PATCHES, patch
from megatron_adaptra.adapter.step.gradients import Handle, connect, difference_of, has_begun
from megatron_adaptra.config import AUTO, AdaptraConfig
from megatron_adaptra.errors import NoConnections, PeerLost
from megatron_adaptra.ir.collective import CollectivePlan, Goal
from megatron_adaptra.model.shard_forms import SHARDED
from megatron_adaptra.plan.collectives.setting import plan_in_file
from megatron_adaptra.plan.collectives.sized_shards import for_shards
from megatron_adaptra.runtime.all_reduce.group import AdaptiveAllReduce
from megatron_adaptra.runtime.collectives.connected import Connected
from megatron_adaptra.runtime.collectives.exchange import FLOATS, ExchangeWork

_WHAT = {
    Goal.REDUCE_SCATTER: "gradients are reduced by Megatron",
    Goal.ALL_GATHER: "parameters are gathered by Megatron",
}


class _Group:
    """The ranks that have a buffer's shards, over connections of their own.

    `adaptive`: measures, and knows what they have voted on; None where a setting names it. An
    iteration begins with the reduction of the same buckets.
    """

    def __init__(self, connected: Connected, adaptive: AdaptiveAllReduce | None) -> None:
        self.connected, self.adaptive = connected, adaptive
        self._first: Any = None

    def begins(self, goal: Goal, buckets: Any) -> None:
        """Megatron starts on `buckets`."""
        if self.adaptive is None or goal is not Goal.REDUCE_SCATTER:
            return
        if self._first is None or buckets is self._first:
            self._first = buckets
            self.adaptive.ready()

    def close(self) -> None:
        (self.adaptive or self.connected).close()


@dataclass
class _Call:
    """A call of Megatron's start function, and the `works` that it has begun by plan."""

    goal: Goal
    group: _Group
    works: list[ExchangeWork] = field(default_factory=list)


class ShardedReduction:
    """Patched in from its making until `close`, on top of GradientReduction, if that is there.

    Args:
        config: the job's settings.
        say: logs a sentence, once, at rank 0.

    Raises:
        BadFile: `--adaptra-allreduce` names a file without a plan.
    """

    def __init__(self, config: AdaptraConfig, say: Callable[[str], None]) -> None:
        self._config, self._say = config, say
        self._given = plan_in_file(config.allreduce)
        self._groups: dict[Any, _Group | None] = {}  # None: it cannot be connected
        self._call: _Call | None = None  # the one that is running
        self._under_way: list[ExchangeWork] = []
        self._plan_of = cache(self._plan)
        reduce, gather, scatter_all, gather_all = (
            getattr(*find(target)) for target in PATCHES["shards"].targets
        )

        def start_grad_sync(buckets: Any, *args: Any, **kwargs: Any) -> None:
            handle = self._started(Goal.REDUCE_SCATTER, reduce, buckets, args, kwargs)
            if handle and buckets.grad_reduce_handle is not None:
                buckets.grad_reduce_handle = handle  # Megatron's own, of nothing, was there
            elif handle:
                handle.wait()

        def start_param_sync(buckets: Any, *args: Any, **kwargs: Any) -> None:
            handle = self._started(Goal.ALL_GATHER, gather, buckets, args, kwargs)
            if handle and buckets.param_gather_handle is not None:
                buckets.param_gather_handle = handle
            elif handle:
                handle.wait()

        def reduce_scatter(shard: Any, whole: Any, *args: Any, **kwargs: Any) -> Any:
            op = kwargs.get("op", dist.ReduceOp.SUM)
            if self._begun(Goal.REDUCE_SCATTER, whole, op):
                return None
            return scatter_all(shard, whole, *args, **kwargs)

        def all_gather(whole: Any, shard: Any, *args: Any, **kwargs: Any) -> Any:
            if self._begun(Goal.ALL_GATHER, whole, dist.ReduceOp.SUM):
                return None
            return gather_all(whole, shard, *args, **kwargs)

        self._patched = patch(
            "shards",
            start_grad_sync=start_grad_sync,
            start_param_sync=start_param_sync,
            dist_reduce_scatter_func=reduce_scatter,
            dist_all_gather_func=all_gather,
        )

    def close(self) -> None:
        """Put Megatron's functions back, and end the connections once all under way has come."""
        with contextlib.ExitStack() as stack:
            for connected in self._groups.values():
                if connected is not None:
                    stack.callback(connected.close)
            self._groups = {}
            self._patched.close()
            for work in self._under_way:
                with contextlib.suppress(PeerLost):  # raised where it is waited for
                    work.wait()

    def _started(
        self, goal: Goal, native: Any, buckets: Any, args: Any, kwargs: Any
    ) -> Handle | None:
        """Call Megatron's start function, with its collectives by plan where they can be.

        What it has begun by plan; None where it is Megatron's own, or has begun before.
        """
        group = None
        if buckets.ddp_config.use_distributed_optimizer:
            group = self._group_of(goal, buckets)
        if group is None or (goal is Goal.REDUCE_SCATTER and has_begun(buckets)):
            native(buckets, *args, **kwargs)
            return None
        group.begins(goal, buckets)
        call = _Call(goal, group)
        before, self._call = self._call, call
        try:
            native(buckets, *args, **kwargs)
        finally:
            self._call = before
        if (adaptive := group.adaptive) is None or goal is Goal.ALL_GATHER:
            return Handle(call.works) if call.works else None
        _measure(adaptive, buckets, call.works)
        return Handle(call.works, adaptive.check) if call.works else None

    def _begun(self, goal: Goal, whole: torch.Tensor, op: Any) -> bool:
        """Begin a collective of the call that is running; whether there is one, of this goal."""
        call = self._call
        if call is None or call.goal is not goal:
            return False
        exchange, plan = call.group.connected.exchange, self._plan_in_force(call, whole.nbytes)
        if plan is None:
            return False
        work = exchange.start(whole, plan, op)
        call.works.append(work)
        self._under_way = [*(one for one in self._under_way if not one.done()), work]
        return True

    def _plan_in_force(self, call: _Call, nbytes: int) -> CollectivePlan | None:
        """For a buffer of `nbytes`; None for Megatron's own collective."""
        if (adaptive := call.group.adaptive) is None:
            return self._plan_of(call.goal, len(call.group.connected.exchange.names), nbytes)
        reduces = call.goal is Goal.REDUCE_SCATTER
        return adaptive.value.plan if reduces else adaptive.value.gathering

    def _plan(self, goal: Goal, ranks: int, nbytes: int) -> CollectivePlan:
        """For a bucket of so many bytes."""
        if self._given is not None:
            return self._given
        return for_shards(goal, self._config.allreduce, ranks, nbytes)

    def _group_of(self, goal: Goal, buckets: Any) -> _Group | None:
        """What reduces or gathers; None where Megatron does. The same on all ranks of the group."""
        if reason := self._not_ours(goal, buckets):
            self._say(f"{_WHAT[goal]}: {reason}")
            return None
        group = buckets.intra_distributed_optimizer_instance_group
        if group not in self._groups:
            self._groups[group] = self._open(group, buckets)
        return self._groups[group]

    def _not_ours(self, goal: Goal, buckets: Any) -> str:
        """Why Megatron has to do it; empty if it need not."""
        config, name = buckets.ddp_config, self._config.allreduce
        if config.num_distributed_optimizer_instances > 1:
            return "the distributed optimizer has several instances"
        reduces = goal is Goal.REDUCE_SCATTER
        if reduces and getattr(config, "reduce_scatter_with_fp32_accumulation", False):
            return "its reduce-scatter adds in fp32 by a way of its own"
        if not reduces and getattr(config, "reuse_grad_buf_for_mxfp8_param_ag", False):
            return "parameters of 8 bits share their memory with gradients"
        for bucket in buckets.buckets:
            data = bucket.grad_data if reduces else bucket.param_data
            if data.layout != torch.strided or data.device.type != "cpu":
                return f"they are {data.layout} on {data.device.type}, not dense on the CPU"
            if data.dtype not in FLOATS or not data.is_contiguous():
                return f"they are {data.dtype} with strides {data.stride()}"
        ranks = buckets.intra_distributed_optimizer_instance_size
        if ranks < 2:
            return f"{name} needs 2 ranks, here is {ranks}"
        if self._given is None:
            return "" if name in (AUTO, *SHARDED) else f"{name} has no {goal.value}"
        if self._given.goal is not goal:
            return f"the plan of {name} is of another goal: {self._given.goal.value}"
        if ranks != (wanted := self._given.ranks):
            return f"the plan of {name} is for {wanted} ranks, here is {ranks}"
        return ""

    def _open(self, group: Any, buckets: Any) -> _Group | None:
        """Connect the ranks of a data-parallel group, if they agree: a collective of it."""
        reason = difference_of(group, buckets)
        if not reason:
            try:
                return _Group(*connect(group, "shards", self._config, sharded=True))
            except NoConnections as error:
                reason = f"cannot connect: {error}"
        for what in _WHAT.values():
            self._say(f"{what}: {reason}")
        return None


def _measure(adaptive: AdaptiveAllReduce, buckets: Any, works: Sequence[ExchangeWork]) -> None:
    """`works` have begun on `buckets`, or where there are none, Megatron's own collective has."""
    nbytes = sum(one.grad_data.nbytes for one in buckets.buckets)
    if works:
        for work in works:
            adaptive.started(nbytes // len(works))
            work.when_done(lambda error: adaptive.ended())
        return
    adaptive.started(nbytes)
    if buckets.ddp_config.overlap_grad_reduce:
        adaptive.untimed()
    adaptive.ended()
