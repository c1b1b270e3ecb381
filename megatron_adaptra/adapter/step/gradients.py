"""Gradients of data-parallel ranks, reduced by a collective plan in place of Megatron's all-reduce.

It stands in for `start_grad_sync` of a group of buckets of plain DDP; those of the distributed
optimizer are in sharded_gradients.py. What it does not handle is left to Megatron, which is logged
once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_adaptra.adapter.compat.patch_attr import find
from megatron_adaptra.adapter.compat.patches import PATCHES, patch
from megatron_adaptra.config import AUTO, AdaptraConfig
from megatron_adaptra.errors import NoConnections
from megatron_adaptra.ir.collective import CollectivePlan, Goal
from megatron_adaptra.plan.collectives.setting import plan_in_file
from megatron_adaptra.plan.collectives.sized import FEWEST_RANKS, for_gradients
from megatron_adaptra.runtime.all_reduce.group import MESHES, AdaptiveAllReduce
from megatron_adaptra.runtime.collectives.connected import Connected
from megatron_adaptra.runtime.collectives.exchange import FLOATS, Exchange, ExchangeWork

# Of Megatron's settings for DDP, what changes what is reduced, and when.
_SAME = ("overlap_grad_reduce", "average_in_collective", "grad_reduce_in_fp32", "bucket_size")


@dataclass(frozen=True)
class _Group:
    """A data-parallel group that reduces by plans, over connections of its own."""

    plan_of: Callable[[int], CollectivePlan]  # of how many bytes
    connected: Connected

    def start(self, buckets: Any, native: Callable[[], None]) -> None:
        """Begin to reduce `buckets`, or do it; `native`: as Megatron does."""
        config = buckets.ddp_config
        works = _start(buckets, self.connected.exchange, self.plan_of)
        _hand_over(buckets, Handle(works), config.overlap_grad_reduce)

    def close(self) -> None:
        self.connected.close()


class _AdaptiveGroup:
    """One whose all-reduce is found and voted on. An iteration begins with the same buckets."""

    def __init__(self, adaptive: AdaptiveAllReduce, exchange: Exchange) -> None:
        self._adaptive, self._exchange = adaptive, exchange
        self._first: Any = None
        self._plan: CollectivePlan | None = None

    def start(self, buckets: Any, native: Callable[[], None]) -> None:
        """As for _Group."""
        adaptive, overlaps = self._adaptive, buckets.ddp_config.overlap_grad_reduce
        if self._first is None or buckets is self._first:
            self._first = buckets
            self._plan = adaptive.ready().plan
        sizes = [one.grad_data.nbytes for one in buckets.buckets]
        if (plan := self._plan) is None:
            adaptive.started(sum(sizes))
            native()
            if overlaps:  # torch's handle is waited for later than it ends
                adaptive.untimed()
            adaptive.ended()
            return
        for nbytes in sizes:
            adaptive.started(nbytes)
        works = _start(buckets, self._exchange, lambda nbytes: plan)
        for work in works:
            work.when_done(lambda error: adaptive.ended())
        _hand_over(buckets, Handle(works, adaptive.check), overlaps)

    def close(self) -> None:
        self._adaptive.close()


class Handle:
    """What Megatron waits for at the end of a reduction that overlaps with its backward."""

    def __init__(self, works: list[ExchangeWork], check: Callable[[], None] | None = None) -> None:
        self._works, self._check = works, check

    def wait(self) -> None:
        """Raises PeerLost, which names the rank that is lost, and what `check` raises."""
        for work in self._works:
            work.wait()
        if self._check is not None:
            self._check()


class GradientReduction:
    """Patched in from its making until `close`.

    Args:
        config: the job's settings.
        say: logs a sentence, once, at rank 0.

    Raises:
        BadFile: `--adaptra-allreduce` names a file without a plan.
    """

    def __init__(self, config: AdaptraConfig, say: Callable[[str], None]) -> None:
        self._config, self._say = config, say
        self._given = plan_in_file(config.allreduce)
        self._groups: dict[
            Any, _Group | _AdaptiveGroup | None
        ] = {}  # None: its connections cannot be opened
        (target,) = PATCHES["gradients"].targets
        native = getattr(*find(target))

        def start_grad_sync(buckets: Any, *args: Any, **kwargs: Any) -> None:
            sharded = buckets.ddp_config.use_distributed_optimizer
            if sharded or (group := self._group_of(buckets)) is None:
                native(buckets, *args, **kwargs)
            elif not has_begun(buckets):
                group.start(buckets, partial(native, buckets, *args, **kwargs))

        self._patched = patch("gradients", start_grad_sync=start_grad_sync)

    def close(self) -> None:
        """Put Megatron's function back, and end the connections."""
        with contextlib.ExitStack() as stack:
            for group in self._groups.values():
                if group is not None:
                    stack.callback(group.close)
            self._groups = {}
            self._patched.close()

    def _group_of(self, buckets: Any) -> _Group | _AdaptiveGroup | None:
        """What reduces them; None where Megatron does. The same on all ranks of their group."""
        if reason := self._not_ours(buckets):
            self._say(f"gradients are reduced by Megatron: {reason}")
            return None
        group = buckets.data_parallel_group
        if group not in self._groups:
            self._groups[group] = self._open(group, buckets)
        return self._groups[group]

    def _not_ours(self, buckets: Any) -> str:
        """Why Megatron has to reduce them; empty if it need not."""
        name = self._config.allreduce
        for bucket in buckets.buckets:
            data = bucket.grad_data
            if data.layout != torch.strided or data.device.type != "cpu":
                return f"they are {data.layout} on {data.device.type}, not dense on the CPU"
            if data.dtype not in FLOATS or not data.is_contiguous():
                return f"they are {data.dtype} with strides {data.stride()}"
        ranks, late = buckets.data_parallel_group.size(), self._config.late
        if self._given is not None:
            if (goal := self._given.goal) is not Goal.ALL_REDUCE:
                return f"the plan of {name} is of another goal: {goal.value}"
            if ranks != (wanted := self._given.ranks):
                return f"the plan of {name} is for {wanted} ranks, here is {ranks}"
            return ""
        if ranks < (fewest := FEWEST_RANKS.get(name, 2)):
            return f"{name} needs {fewest} ranks, here is {ranks}"
        if late and (late[-1] >= ranks or len(late) == ranks):
            return f"late are {self._config.late_ranks}, of ranks 0 to {ranks - 1}"
        return ""

    def _open(self, group: Any, buckets: Any) -> _Group | _AdaptiveGroup | None:
        """Connect the ranks of a data-parallel group, if they agree: a collective of it."""
        if difference := difference_of(group, buckets):
            self._say(f"gradients are reduced by Megatron: {difference}")
            return None
        try:
            connected, adaptive = connect(group, "gradients", self._config)
        except NoConnections as error:
            self._say(f"gradients are reduced by Megatron: cannot connect: {error}")
            return None
        if adaptive is None:
            return _Group(cache(partial(self._plan, group.size())), connected)
        return _AdaptiveGroup(adaptive, connected.exchange)

    def _plan(self, ranks: int, nbytes: int) -> CollectivePlan:
        """For a bucket of so many bytes."""
        if self._given is not None:
            return self._given
        return for_gradients(self._config.allreduce, ranks, nbytes, self._config.late)


def connect(
    group: Any, name: str, config: AdaptraConfig, sharded: bool = False
) -> tuple[Connected, AdaptiveAllReduce | None]:
    """Connect the ranks of a `group`: a collective of it.

    Args:
        group: of torch.distributed.
        name: of the connections' use.
        config: the job's settings.
        sharded: see AdaptiveAllReduce.

    Returns:
        The connections, and what finds out and votes, under `--adaptra-allreduce auto`.

    Raises:
        NoConnections: they cannot be opened, on all ranks for the same reason.
    """
    auto = config.allreduce == AUTO
    connected = Connected.between(
        group, name, config.timeout, config.transport, config.encrypt, MESHES if auto else ()
    )
    if not auto:
        return connected, None
    ranks = tuple(dist.get_process_group_ranks(group))
    log = Path(config.decision_log) if config.decision_log else None
    log = log and log.with_suffix(f".{name}{ranks[0]}{log.suffix}")
    return connected, AdaptiveAllReduce(
        connected, group.rank(), ranks, config.min_gain, config.timeout, log, sharded
    )


def difference_of(group: Any, buckets: Any) -> str:
    """The first thing in which the ranks of a `group` differ, in words; "" if they do not."""
    config = buckets.ddp_config
    mine = {name: getattr(config, name) for name in _SAME}
    data = [one.grad_data for one in buckets.buckets]
    mine["buckets"] = [f"{one.numel()} {one.dtype}" for one in data]
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, mine, group=group)
    ranks = dist.get_process_group_ranks(group)
    for rank, theirs in zip(ranks, gathered, strict=True):
        for name, value in gathered[0].items():
            if theirs[name] != value:
                return f"{name} is {theirs[name]} on rank {rank}, {value} on rank {ranks[0]}"
    return ""


def has_begun(buckets: Any) -> bool:
    """Whether their reduction is under way, as it may be in a training's first iteration."""
    if buckets.is_first_batch and buckets.grad_reduce_handle is not None:
        return True
    assert buckets.grad_reduce_handle is None, "an all-reduce of these buckets is under way"
    return False


def _start(
    buckets: Any, exchange: Exchange, plan_of: Callable[[int], CollectivePlan]
) -> list[ExchangeWork]:
    """What Megatron's start_grad_sync does for plain DDP, but for the all-reduce."""
    config = buckets.ddp_config
    if config.check_for_nan_in_grad or config.check_for_large_grads:
        buckets.check_grads(
            check_for_nan_or_inf=config.check_for_nan_in_grad,
            check_for_large=config.check_for_large_grads,
        )
    for bucket in buckets.buckets:
        if bucket.gradient_scaling_factor != 1.0:
            bucket.grad_data *= bucket.gradient_scaling_factor
    op = dist.ReduceOp.AVG if config.average_in_collective else dist.ReduceOp.SUM
    return [
        exchange.start(one.grad_data, plan_of(one.grad_data.nbytes), op) for one in buckets.buckets
    ]


def _hand_over(buckets: Any, handle: Handle, overlaps: bool) -> None:
    if overlaps:
        buckets.grad_reduce_handle = handle
    else:
        handle.wait()
