"""Collectives by plan inside Megatron's own functions.

Megatron's function runs as ever, with a plan's collective in place of calls of torch.distributed in
it, and our handle for collectives that overlap with a forward or backward. Cases that are not
handled are left to Megatron, which is logged once.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from megatron_adaptra.adapt.loop import Loop
from megatron_adaptra.adapt.reductions.remedy import ReductionRemedy
from megatron_adaptra.adapt.switch import Acts, always
from megatron_adaptra.adapter.compat.patches import patch
from megatron_adaptra.adapter.limits import REDUCTIONS, Collective, why_not
from megatron_adaptra.adapter.step.planned_groups import (
    NewBook,
    PlannedGroup,
    data_parallel_number,
    difference_of,
    late_in,
    of_experts,
)
from megatron_adaptra.base.errors import DeviceFailed, NoConnections, PeerLost
from megatron_adaptra.base.log import log_line
from megatron_adaptra.config import AdaptraConfig
from megatron_adaptra.device.base import HostDevice
from megatron_adaptra.device.cuda import device_of
from megatron_adaptra.execute.planned.exchange import ExchangeWork
from megatron_adaptra.ir.collective import CollectivePlan, Goal
from megatron_adaptra.plan.reductions.sized import for_gradients, for_shards, plan_in_file


class Handle:
    """A handle lets Megatron wait for collectives that overlap with other work.

    Args:
        works: of plans, or handles of Megatron's own.
        then: called once they are over; one that raises ends the training. A reduction of
            Megatron's counts as ended only here: where backwards have hidden all of it, it ends
            with them.
        hidden: gets the seconds from the making of this handle to the wait for it.
    """

    def __init__(
        self,
        works: Sequence[Any],
        then: Iterable[Callable[[], None]] = (),
        hidden: Callable[[float], None] | None = None,
    ) -> None:
        self._works, self._then, self._hidden = works, list(then), hidden
        self._began = time.monotonic()

    def wait(self) -> None:
        """Wait for all works. Raises PeerLost, which names the rank, and what `then` raises."""
        if self._hidden is not None:
            self._hidden(time.monotonic() - self._began)
        for work in self._works:
            work.wait()
        for call in self._then:
            call()


@dataclass
class _Call:
    """A call records a function of Megatron's that runs on `buckets`, and what it has begun.

    `groups`: by goal, over which a plan may take part. `works`: begun by plan. `native`: by goal,
    how many collectives torch runs of a group that measures them.
    """

    buckets: Any
    groups: Mapping[Goal, PlannedGroup]
    works: list[ExchangeWork] = field(default_factory=list)
    goals: set[Goal] = field(default_factory=set)
    native: Counter[Goal] = field(default_factory=Counter)


class PlannedCollectives(ABC):
    """A PlannedCollectives object patches collectives in Megatron, from its making to `close`.

    `active`: plans may run now; while False, Megatron does all, as if nothing was patched.
    `announce`: decisions go to the log of the training, too; set before the first reduction.

    Args:
        config: the job's settings.
        say: logs a sentence, once, at rank 0.
        acts: see Loop.
        new_book: makes a book for findings; None for none.

    Raises:
        BadFile: `--adaptra-allreduce` names a file without a plan.
    """

    def __init__(
        self,
        config: AdaptraConfig,
        say: Callable[[str], None],
        acts: Acts = always,
        new_book: NewBook | None = None,
    ) -> None:
        self.active = self.announce = True
        self._config, self._say, self._acts, self._new_book = config, say, acts, new_book
        self._given = plan_in_file(config.allreduce)
        self._groups: dict[Any, PlannedGroup | str] = {}  # or why Megatron does it
        # The groups found for buckets on a host, whose tensors stay as they are.
        self._found: WeakKeyDictionary[Any, dict[Goal, PlannedGroup]] = WeakKeyDictionary()
        self._call: _Call | None = None  # the one that is running
        self._under_way: list[ExchangeWork] = []
        self._patched = self._patch()

    @abstractmethod
    def _patch(self) -> contextlib.ExitStack:
        """Put ours in place of Megatron's functions; to close the returned stack takes it back."""

    @property
    def _planned_groups(self) -> list[PlannedGroup]:
        return [one for one in self._groups.values() if isinstance(one, PlannedGroup)]

    @property
    def loops(self) -> list[Loop[ReductionRemedy]]:
        """The loops that choose plans for the groups that this rank is the first of."""
        return [one.loop for one in self._planned_groups if one.loop is not None]

    def scalars(self) -> dict[str, float]:
        """Collect the values for charts of all groups of this rank; see PlannedGroup."""
        return {
            name: value for one in self._planned_groups for name, value in one.scalars().items()
        }

    def close(self) -> None:
        """Put Megatron's functions back, and end the connections once all under way has come."""
        with contextlib.ExitStack() as stack:
            for group in self._planned_groups:
                stack.callback(group.close)
            self._groups = {}
            self._found.clear()
            self._patched.close()
            for work in self._under_way:  # parameters may be on their way to the next forward
                with contextlib.suppress(PeerLost):  # raised where it is waited for
                    work.wait()

    # In Megatron's functions.

    def _run(
        self, native: Callable[[], None], buckets: Any, groups: Mapping[Goal, PlannedGroup | None]
    ) -> None:
        """Call Megatron's function, with its collectives over `groups` by plan where there is one.

        Megatron gets a handle of those that are to overlap; others are waited for.

        Raises:
            PeerLost, Disagreement: as `Handle.wait`.
        """
        call = _Call(buckets, {goal: one for goal, one in groups.items() if one is not None})
        before, self._call = self._call, call
        try:
            with (
                self._all_reduces() if Goal.ALL_REDUCE in call.groups else contextlib.nullcontext()
            ):
                native()
        finally:
            self._call = before
        for goal in list(call.native):
            self._end_native(call, goal)
        if not call.works:
            return
        measured = [
            call.groups[goal].adaptive for goal in call.goals if goal is not Goal.ALL_GATHER
        ]
        handle = Handle(call.works, [one.check for one in measured if one is not None])
        # Megatron's own handle, of nothing, is there where a collective overlaps.
        if Goal.ALL_GATHER in groups and buckets.param_gather_handle is not None:
            buckets.param_gather_handle = handle
        elif Goal.ALL_GATHER not in groups and buckets.grad_reduce_handle is not None:
            buckets.grad_reduce_handle = handle
        else:
            handle.wait()

    def _all_reduces(self) -> contextlib.AbstractContextManager[Any]:
        """Run the all-reduces of the running call by plan, in a `with`."""
        torch_all_reduce = dist.all_reduce

        def all_reduce(
            tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
        ) -> Any:
            if self._begun(Goal.ALL_REDUCE, tensor, op, group):
                return None
            return torch_all_reduce(tensor, op=op, group=group, async_op=async_op)

        return patch("sums", all_reduce=all_reduce)

    def _begun(self, goal: Goal, whole: torch.Tensor, op: Any, group: Any) -> bool:
        """Begin a collective of the running call by plan; return whether there is a plan for it.

        Else torch has to begin it, which is measured.
        """
        call = self._call
        planned = None if call is None else call.groups.get(goal)
        if call is None or planned is None or planned.group is not group:
            return False
        adaptive, gathers = planned.adaptive, goal is Goal.ALL_GATHER
        if goal not in call.goals:
            for work in call.works:  # between instances: of the sums that each of them has
                work.wait()
            for other in list(call.native):
                self._end_native(call, other)
            call.goals.add(goal)
            if not gathers:
                planned.begins(call.buckets)
        if adaptive is not None and not gathers:
            adaptive.started(whole.nbytes)
        if (plan := planned.plan(goal, whole.nbytes)) is None:
            call.native[goal] += adaptive is not None
            return False
        work = planned.exchange.start(whole, plan, op)
        if adaptive is not None:
            over = adaptive.gathered if gathers else adaptive.ended
            work.when_done(lambda error: over())
        call.works.append(work)
        self._under_way = [*(one for one in self._under_way if not one.done()), work]
        return True

    def _end_native(self, call: _Call, goal: Goal) -> None:
        """End torch's collectives in a `call` for a `goal`, now or when they are waited for."""
        adaptive, buckets = call.groups[goal].adaptive, call.buckets
        count = call.native.pop(goal, 0)
        if adaptive is None or not count:
            return
        gathers = goal is Goal.ALL_GATHER
        # When a gather ends may not be known here: it may have ended now, or later.
        ends = [adaptive.gathered if gathers else adaptive.ended] * count
        overlaps = not gathers and _overlaps(buckets.ddp_config)
        if not overlaps or (native := buckets.grad_reduce_handle) is None:
            Handle([], ends).wait()
        else:
            buckets.grad_reduce_handle = Handle([native], ends)

    # The choice of groups.

    def _planned(
        self,
        goal: Goal,
        what: str,
        group: Any,
        buckets: Any,
        tensors: Iterable[torch.Tensor],
        within: Any = None,
    ) -> PlannedGroup | None:
        """Find the group that reduces or gathers `buckets`, alike on all ranks; None for Megatron.

        Args:
            goal: of the collective.
            what: words for what Megatron does where no plan can do it.
            group: of torch's ranks.
            buckets: of Megatron's.
            tensors: of the collective; those on a host are looked at once.
            within: a group whose ranks are all late where one of them is.
        """
        known = self._found.setdefault(buckets, {})
        if goal in known:
            return known[goal]
        tensors = list(tensors)
        case = Collective(
            self._config.allreduce, self._given, goal, group.size(), tensors, buckets.ddp_config
        )
        reason = why_not(REDUCTIONS, case)
        if not reason:
            if group not in self._groups:
                self._groups[group] = self._open(goal, group, buckets, within)
            found = self._groups[group]
            if not isinstance(found, str):
                if all(one.device.type == "cpu" for one in tensors):
                    known[goal] = found
                return found
            reason = found
        self._say(f"{what} by Megatron: {reason}")
        return None

    def _open(self, goal: Goal, group: Any, buckets: Any, within: Any) -> PlannedGroup | str:
        """Connect the ranks of a group, a collective of it; return why not if they disagree."""
        where = buckets.buckets[0].grad_data.device
        try:
            device, lacks = device_of(where), ""
        except DeviceFailed as error:
            device, lacks = HostDevice(), f"out of reach: {error}"
        if difference := difference_of(group, buckets, lacks or where.type):
            return difference
        if lacks:
            return f"{where} is {lacks}"
        sharded = goal is not Goal.ALL_REDUCE
        late = () if sharded else self._late_in(group, within)
        if self._config.allreduce == "stragglar" and len(late) != 1:
            return f"stragglar needs one rank that is late, here are {len(late)}"
        use = "instances"
        if within is None:  # dense parameters and experts may have the same ranks
            use = ("expert-" if of_experts(buckets) else "") + (
                "shards" if sharded else "gradients"
            )
        ranks, name, given = group.size(), self._config.allreduce, self._given

        @cache
        def plan_of(goal: Goal, nbytes: int) -> CollectivePlan:
            if given is not None:
                return given
            if goal is Goal.ALL_REDUCE:
                return for_gradients(name, ranks, nbytes, late)
            return for_shards(goal, name, ranks, nbytes)

        overlaps = _overlaps(buckets.ddp_config)
        try:
            planned = PlannedGroup(
                group,
                use,
                self._config,
                device,
                plan_of,
                sharded,
                overlaps,
                self._acts,
                self._new_book,
            )
        except NoConnections as error:
            return str(error)
        if planned.loop is not None:
            planned.loop.announce = log_line if self.announce else None
        if device.behind:
            self._say(f"gradients stay with {dist.get_backend(group)}: who comes late is measured")
        return planned

    def _late_in(self, group: Any, within: Any) -> tuple[int, ...]:
        """Return the ranks in a `group` that `--adaptra-late-ranks` names; () if it names all."""
        if not self._config.late:
            return ()
        late = data_parallel_number() in self._config.late
        if within is not None:
            late = bool(late_in(within, late))
        found = late_in(group, late)
        return () if len(found) == group.size() else found


def _overlaps(config: Any) -> bool:
    """Return whether gradients are reduced while others are computed, by the `config` of DDP.

    With several optimizer instances none are: each reduction has ended with Megatron's function.
    """
    return bool(config.overlap_grad_reduce) and config.num_distributed_optimizer_instances == 1
