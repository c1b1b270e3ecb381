"""A checkpoint's plan: data from a file, which may be damaged, or from a job of another shape."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from megatron_adaptra.base.errors import AdaptraError, BadFile, line_of
from megatron_adaptra.base.units import LONGEST
from megatron_adaptra.base.user_files import read_data
from megatron_adaptra.config import Budget
from megatron_adaptra.ir.check import check
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Line, Schedule, warmup_line, warmup_of
from megatron_adaptra.plan.pipeline.fixed import interleaved_line

FORMAT = 1
_ORDERED = ({Kind.F}, {Kind.B, Kind.I}, {Kind.B, Kind.W})  # each by microbatch, for equal bits
_PARTS = {Kind.I: "halves of backwards", Kind.W: "halves of backwards", Kind.R: "recompute"}


def read_state(path: Path) -> Any:
    """Read the checkpoint's file `path` for `Fits.take`; None without it, a sentence if damaged."""
    try:
        return read_data(path, "plan") if os.path.lexists(path) else None  # stock Megatron's
    except BadFile as error:
        return line_of(error)


class Unfit(AdaptraError):
    """An Unfit error says why this job cannot begin with a checkpoint's plan."""


@dataclass(frozen=True)
class Fits:
    """A Fits decides whether a job can begin with a checkpoint's plan.

    `start`: the schedule it begins with otherwise. `adapts`: its policy is `adaptive`. `kinds`: the
    ops that it can run. `free`: it can run them in any order, else in Megatron's alone.
    """

    start: Schedule
    adapts: bool
    kinds: Collection[Kind]
    free: bool
    budget: Budget

    def take(self, state: Any) -> tuple[Schedule, dict[str, float]]:
        """Return the plan in `state`, and the seconds by link that it is made for.

        `state`: what the checkpoint's file holds, or a sentence that says why that is not known.
        Raises Unfit.
        """
        if isinstance(state, str):
            raise Unfit(state)
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise Unfit(f"it is not of format {FORMAT}")
        try:
            schedule = Schedule.parse(state["schedule"])
            self._shape(schedule)
            if schedule.order == self.start.order:
                schedule = self.start  # whose messages are this job's, not the other's
            elif schedule.stock:
                raise Unfit("it leaves messages to Megatron, in another order than this job's")
            delays = _delays(state["delays"], len(schedule.order))
            if not self.adapts and schedule.order != self.start.order:
                raise Unfit(f"this job's policy is {self.start.policy}")
            if self.adapts:
                self._ops(schedule)
                check(lower(schedule))
                self._memory(schedule)
        except Unfit:
            raise
        except Exception as error:  # whatever a damaged file leads to
            raise Unfit(f"it is damaged: {line_of(error)[:200]}") from None
        return schedule, delays

    def _shape(self, schedule: Schedule) -> None:
        theirs, ours = (
            (one.stages, one.microbatches, one.chunks, one.replicas)
            for one in (schedule, self.start)
        )
        if theirs != ours:
            raise Unfit(f"it has {_words(theirs)}, this job has {_words(ours)}")

    def _ops(self, schedule: Schedule) -> None:
        """Check that each op is of a kind that can run, in an order that keeps the bits."""
        homes = (None,) if schedule.replicas == 1 else range(schedule.replicas)
        name = schedule.routes.name
        for worker, line in enumerate(schedule.order):
            for op in line:
                inside = op.microbatch < schedule.microbatches and op.chunk < schedule.chunks
                if not inside or op.home not in homes:
                    raise Unfit(f"it has op {op}")
                if op.kind not in self.kinds:
                    raise Unfit(f"it has {_PARTS[op.kind]}, which this job cannot run")
            if self.free:
                for kinds, home in product(_ORDERED, homes):
                    mine = (op for op in line if op.kind in kinds and op.home == home)
                    numbers = [op.microbatch for op in mine]
                    if numbers != sorted(numbers):
                        raise Unfit(f"{name(worker)} takes microbatches out of their order")
            elif tuple(op._replace(home=None) for op in line) != _megatrons(worker, schedule):
                raise Unfit(f"{name(worker)} runs an order that Megatron's own schedule does not")

    def _memory(self, schedule: Schedule) -> None:
        peaks = schedule.peak_in_flight()
        if self.budget.in_bytes:  # which are not measured yet
            limits = self.start.peak_in_flight()
        else:
            limits = (self.budget.microbatches,) * len(schedule.order)
        for worker, (peak, limit) in enumerate(zip(peaks, limits, strict=True)):
            if peak > limit:
                name = schedule.routes.name(worker)
                raise Unfit(f"{name} holds {peak:g} microbatches, {limit:g} are allowed")


def _words(shape: tuple[int, ...]) -> str:
    stages, microbatches, chunks, replicas = shape
    together = f" in {replicas} replicas" if replicas > 1 else ""
    return f"{stages} stages, {microbatches} microbatches and {chunks} chunks{together}"


def _megatrons(worker: int, schedule: Schedule) -> Line:
    """Return the line of Megatron's own schedule at the warmup depth of a `schedule`'s worker."""
    depth, stages, count = warmup_of(schedule.order[worker]), schedule.stages, schedule.microbatches
    stage = worker % stages
    if schedule.chunks == 1:
        return warmup_line(depth, count)

    def line(more: int) -> Line:
        return interleaved_line(stage, stages, count, schedule.chunks, stages, more)

    return line(max(0, depth - warmup_of(line(0))))


def _delays(found: Any, workers: int) -> dict[str, float]:
    links = {f"{a}>{b}" for a in range(workers) for b in range(workers)}
    if not isinstance(found, dict) or not found.keys() <= links:
        raise Unfit("its delays are of no links of this pipeline")
    for seconds in found.values():
        number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not number or not 0 <= seconds <= LONGEST or not math.isfinite(seconds):
            raise Unfit("its delays are no seconds")
    return dict(found)
