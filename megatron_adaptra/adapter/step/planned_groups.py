"""Groups of ranks that Megatron reduces or gathers over, with connections of our own for plans."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_adaptra.adapt.loop import Loop
from megatron_adaptra.adapt.reductions.decisions import ranks_in_words
from megatron_adaptra.adapt.reductions.remedy import ReductionRemedy
from megatron_adaptra.adapt.switch import Acts, always
from megatron_adaptra.config import AUTO, AdaptraConfig
from megatron_adaptra.device.base import Device
from megatron_adaptra.diagnose.book import FindingBook
from megatron_adaptra.diagnose.finding import Place
from megatron_adaptra.diagnose.late import LateDiagnosis
from megatron_adaptra.execute.planned.connected import Connected
from megatron_adaptra.execute.planned.measured import MESHES, MeasuredReductions
from megatron_adaptra.ir.collective import CollectivePlan, Goal
from megatron_adaptra.ir.routes import worker_name
from megatron_adaptra.transport.connect import gather

NewBook = Callable[[], FindingBook]

# Megatron's settings for DDP that change what is reduced, and when.
_SAME = ("overlap_grad_reduce", "average_in_collective", "grad_reduce_in_fp32", "bucket_size")


class PlannedGroup:
    """A PlannedGroup connects the ranks of torch's process `group` for collectives by plan.

    To make one is a collective of the group.

    `exchange`: this rank's side of them. `adaptive`: measures, and knows the plan that ranks have
    voted on, or that none runs on a GPU; None where a setting names the plan.

    Args:
        group: torch's.
        name: of what is reduced, in charts; and of the connections' use.
        config: the job's settings.
        device: that buffers are on.
        plan_of: the plan that the setting names, for a goal and so many bytes.
        sharded, overlaps: see MeasuredReductions.
        acts: see Loop.
        new_book: makes a book for findings; None for none.

    Raises:
        NoConnections: they cannot be opened, on all ranks for the same reason.
    """

    def __init__(
        self,
        group: Any,
        name: str,
        config: AdaptraConfig,
        device: Device,
        plan_of: Callable[[Goal, int], CollectivePlan],
        sharded: bool = False,
        overlaps: bool = False,
        acts: Acts = always,
        new_book: NewBook | None = None,
    ) -> None:
        self.group, self.name, self._plan_of = group, name, plan_of
        auto = config.allreduce == AUTO
        meshes = (MESHES[:-1] if device.behind else MESHES) if auto else ()
        self._connected = Connected.between(
            group, name, config.timeout, config.transport, config.encrypt, meshes
        )
        self.exchange = self._connected.exchange
        self.adaptive: MeasuredReductions | None = None
        if auto:
            ranks = tuple(dist.get_process_group_ranks(group))
            places = gather(own_place(), group)
            diagnosis = None
            if new_book is not None:
                diagnosis = LateDiagnosis(places, ranks_in_words(ranks), new_book())
            self.adaptive = MeasuredReductions(
                self._connected, group.rank(), ranks, config.min_gain, config.timeout,
                config.log_file(f"{name}{ranks[0]}"), sharded, overlaps, device,
                dist.get_backend(group), acts, diagnosis,
            )  # fmt: skip
        self._first: Any = None

    @property
    def loop(self) -> Loop[ReductionRemedy] | None:
        """The loop that chooses plans, at the group's first rank; None where none does."""
        return None if self.adaptive is None else self.adaptive.loop

    def begins(self, buckets: Any) -> None:
        """Prepare to reduce gradients of `buckets`; the first ones seen begin each iteration.

        Raises what `MeasuredReductions.ready` does.
        """
        if self._first is None or buckets is self._first:
            self._first = buckets
            if self.adaptive is not None:
                self.adaptive.ready()

    def plan(self, goal: Goal, nbytes: int) -> CollectivePlan | None:
        """Return the plan for a buffer of `nbytes`; None for Megatron's own collective."""
        if self.adaptive is None:
            return self._plan_of(goal, nbytes)
        value = self.adaptive.value
        return value.gathering if goal is Goal.ALL_GATHER else value.plan

    def scalars(self) -> dict[str, float]:
        """Return chart values: who comes late, whether a plan runs; {} where a setting names it."""
        if self.adaptive is None:
            return {}
        late = {f"late-ms/{self.name}/rank-{r}": 1e3 * s for r, s in self.adaptive.late.items()}
        return {f"by-plan/{self.name}": float(self.adaptive.value.plan is not None), **late}

    def close(self) -> None:
        """End what measures, and the connections."""
        (self.adaptive or self._connected).close()


def difference_of(group: Any, buckets: Any, device: str) -> str:
    """Describe the first thing in which the ranks of a `group` differ; "" if they do not.

    Settings, the sizes of `buckets` and the `device` are compared: its type, or why it is out of
    reach. A collective of the group.
    """
    config = buckets.ddp_config
    mine = {"device": device, **{name: getattr(config, name) for name in _SAME}}
    data = [one.grad_data for one in buckets.buckets]
    mine["buckets"] = [f"{one.numel()} {one.dtype}" for one in data]
    gathered = gather(mine, group)
    ranks = dist.get_process_group_ranks(group)
    for rank, theirs in zip(ranks, gathered, strict=True):
        for name, value in gathered[0].items():
            if theirs[name] != value:
                return f"{name} is {theirs[name]} on rank {rank}, {value} on rank {ranks[0]}"
    return ""


def own_place() -> Place:
    """Return this rank's place, for findings."""
    from megatron.core import parallel_state as mpu

    stage, stages = (
        mpu.get_pipeline_model_parallel_rank(), mpu.get_pipeline_model_parallel_world_size()
    )  # fmt: skip
    name = worker_name(mpu.get_data_parallel_rank() * stages + stage, stages)
    return Place(stage, dist.get_rank(), socket.gethostname(), "", name)


def data_parallel_number() -> int:
    """Return this rank's number among data-parallel ranks, as `--adaptra-late-ranks` counts."""
    from megatron.core import parallel_state as mpu

    return int(mpu.get_data_parallel_rank(with_context_parallel=True))


def of_experts(buckets: Any) -> bool:
    """Return whether `buckets` have parameters of experts, which only some of the ranks have."""
    return any(not getattr(one, "allreduce", True) for one in buckets.params)


def late_in(group: Any, late: bool) -> tuple[int, ...]:
    """Return the numbers, in a `group`, of its ranks that are `late`. A collective of it.

    Expert-parallel groups and those between optimizer instances number ranks in their own way.
    """
    return tuple(number for number, one in enumerate(gather(late, group)) if one)
