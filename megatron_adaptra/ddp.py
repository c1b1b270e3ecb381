"""PyTorch's DistributedDataParallel without Megatron: gradients by plan, in two lines.

from megatron_adaptra.ddp import all_reduce_hook
model.register_comm_hook(*all_reduce_hook("direct", late_ranks=[3]))
"""

# No annotations from __future__ here: torch reads those of a hook, which have to be classes.
import contextlib
from collections.abc import Callable, Sequence
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.base.exits import at_exit
from megatron_adaptra.base.log import log_line
from megatron_adaptra.execute.planned.connected import Connected
from megatron_adaptra.execute.planned.exchange import FLOATS
from megatron_adaptra.execute.planned.measured import MESHES, MeasuredReductions
from megatron_adaptra.ir.collective import CollectivePlan
from megatron_adaptra.plan.reductions.sized import for_gradients
from megatron_adaptra.transport.connect import patience

_Hook = Callable[[Any, dist.GradBucket], Future[torch.Tensor]]


class _State:
    def __init__(
        self,
        connected: Connected,
        plan_of: Callable[[int], CollectivePlan] | None,  # by a buffer's bytes; None for `auto`
        group: dist.ProcessGroup,
    ) -> None:
        self.connected, self.plan_of, self.group = connected, plan_of, group
        self.native = False  # True once torch has reduced gradients, which is logged once

    def reduce(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> Future[torch.Tensor]:
        """Start to average `buffer`, that of a `bucket`, over the ranks; return its future."""
        assert self.plan_of is not None
        return self._by_plan(buffer, self.plan_of(buffer.nbytes))

    def close(self) -> None:
        """End the connections."""
        self.connected.close()

    def _by_plan(self, buffer: torch.Tensor, plan: CollectivePlan) -> Future[torch.Tensor]:
        future: Future[torch.Tensor] = Future()
        work = self.connected.exchange.start(buffer, plan, dist.ReduceOp.AVG)
        work.when_done(lambda error: _finish(future, buffer, error))
        return future


class _AdaptiveState(_State):
    """An adaptive state finds its all-reduce and votes on it; first buckets begin iterations."""

    def __init__(
        self,
        connected: Connected,
        group: dist.ProcessGroup,
        min_gain: float,
        timeout: float,
        log: Path | None,
        ends: contextlib.ExitStack,
    ) -> None:
        super().__init__(connected, None, group)
        ranks = tuple(dist.get_process_group_ranks(group))
        self._adaptive = MeasuredReductions(
            connected, group.rank(), ranks, min_gain, timeout, log, overlaps=True
        )
        self._ends = ends
        ends.callback(self.close)

    def reduce(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> Future[torch.Tensor]:
        adaptive = self._adaptive
        if bucket.index() == 0:
            adaptive.ready()
        adaptive.started(buffer.nbytes)
        if (plan := adaptive.value.plan) is None:
            return self._natively(buffer)
        future = self._by_plan(buffer, plan)
        future.add_done_callback(lambda done: adaptive.ended())
        return future

    def _natively(self, buffer: torch.Tensor) -> Future[torch.Tensor]:
        """Reduce `buffer` to the same bits as DistributedDataParallel without a hook.

        That multiplies gradients by a fraction when it copies them into a bucket. torch's own hook
        divides, which rounds differently unless ranks are a power of two; so does torch without a
        hook where gradients are views of buckets and are not set to None.
        """
        buffer.mul_(1 / self.group.size())
        work = dist.all_reduce(buffer, group=self.group, async_op=True)

        def result(done: Future[list[torch.Tensor]]) -> torch.Tensor:
            self._adaptive.ended()  # here: a second callback would wait for Python's lock once more
            return done.value()[0]

        return work.get_future().then(result)

    def close(self) -> None:
        self._adaptive.close()


def all_reduce_hook(
    algorithm: str = "direct",
    late_ranks: Sequence[int] = (),
    *,
    pieces: int = 0,
    group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
    transport: str = "auto",
    min_gain: float = 0.15,
    decision_log: str | PathLike[str] | None = None,
) -> tuple[Any, _Hook]:
    """The state and the hook for `DistributedDataParallel.register_comm_hook`.

    A collective of the group: it connects all ranks. Gradients are averaged: added in the order of
    ranks, and divided once. Gradients that are not dense floats on the CPU are reduced by torch,
    which is logged once.

    Args:
        algorithm: auto, which is torch's own until a rank is found to be late, or a port slow, and
            then what is predicted to be fastest; direct, which has an owner for each piece of a
            bucket; stragglar, ring, halving-doubling or sorted-chain (docs/allreduce.md).
        late_ranks: ranks of the group that own nothing, so that the others need not wait for them
            before they have added what they own.
        pieces: into which the largest share is cut; 0 for the best number that a model predicts.
        group: the model's; the default group if None.
        timeout: seconds that a message of another rank is waited for, or those of torch's default
            process group, if they are more.
        transport: auto, engine or gloo.
        min_gain: of auto: share of an iteration that a plan has to save.
        decision_log: of auto: file that decisions are appended to, as JSON lines, by the group's
            first rank.

    Raises:
        BadInput: an algorithm or ranks that there are not, or an engine that is missing.
        NoConnections: the ranks cannot be connected.
    """
    group = group or dist.group.WORLD
    if group is None:
        raise BadInput("group", None, "call torch.distributed.init_process_group first")
    timeout = patience(timeout)
    if algorithm == "auto":
        if late_ranks or pieces:
            raise BadInput("late_ranks, pieces", (late_ranks, pieces), "auto finds them")
        ends = contextlib.ExitStack()
        at_exit(ends, contextlib.ExitStack.close)  # the vote, before connections end by themselves
        connected = Connected.between(group, "ddp", timeout, transport, meshes=MESHES)
        adaptive = _AdaptiveState(
            connected, group, min_gain, timeout, Path(decision_log) if decision_log else None, ends
        )
        return adaptive, _reduce
    plan_of = cache(
        lambda nbytes: for_gradients(algorithm, group.size(), nbytes, late_ranks, pieces)
    )
    plan_of(1)  # raises BadInput for impossible options
    state = _State(Connected.between(group, "ddp", timeout, transport), plan_of, group)
    at_exit(state, _State.close)
    return state, _reduce


def _reduce(state: _State, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """The hook: a future of the averaged buffer of `bucket`."""
    buffer = bucket.buffer()
    if buffer.device.type != "cpu" or buffer.dtype not in FLOATS:
        if not state.native and state.group.rank() == 0:
            what = f"{buffer.dtype} on {buffer.device.type}"
            log_line(f"gradients are {what}: torch reduces them; plans are for floats on the CPU")
        state.native = True
        return allreduce_hook(state.group, bucket)
    return state.reduce(bucket, buffer)


def _finish(
    future: Future[torch.Tensor], buffer: torch.Tensor, error: BaseException | None
) -> None:
    if error is None:
        future.set_result(buffer)
    else:
        future.set_exception(error)
