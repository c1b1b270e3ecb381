"""The schedule that a job starts with, and that it keeps under a policy that does not adapt."""

from __future__ import annotations

from dataclasses import replace

from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.schedule import STOCK, Line, Schedule
from megatron_adaptra.plan.pipeline.base import PLANNERS
from megatron_adaptra.plan.pipeline.fixed import first_schedule


def starting_schedule(
    policy: str, stages: int, microbatches: int, chunks: int, budget: float, recompute: bool
) -> Schedule:
    """Return the schedule of a fixed policy; for `adaptive`, the one that Megatron runs.

    `policy` is a name, for so many `stages`, `microbatches` and `chunks` per stage. `recompute`: a
    fixed policy recomputes everything. `budget`: microbatches in flight; 1F1B keeps to it. Raises
    BadInput where a policy does not exist for this shape.
    """
    if policy == "adaptive":
        policy, recompute = ("interleaved" if chunks > 1 else "1f1b"), False
    if policy == "1f1b" and chunks == 1:
        schedule = first_schedule(stages, microbatches, budget)
    else:
        even = (1.0,) * stages
        conditions = Conditions(microbatches, even, even, even, chunks=chunks)
        schedule = PLANNERS[policy](conditions, "eager", None)
    return recomputed(schedule) if recompute else schedule


def over_own_messages(schedule: Schedule) -> Schedule:
    """Return the order for Megatron's own code and messages, which a healthy job on GPUs runs."""
    return replace(schedule, policy=STOCK, why="Megatron's own schedule over its own messages")


def recomputed(schedule: Schedule) -> Schedule:
    """Return the same order with every forward recomputed right before its backward.

    Exceptions are forwards whose backward follows at once, and those at the model's last position,
    where the backward waits for no message.
    """
    last = schedule.stages * schedule.chunks - 1

    def line(stage: int, ops: Line) -> Line:
        out: list[Op] = []
        for op in ops:
            backward = op.kind in (Kind.B, Kind.I)
            follows = bool(out) and out[-1] == op._replace(kind=Kind.F)
            if backward and not follows and op.chunk * schedule.stages + stage != last:
                out.append(op._replace(kind=Kind.R))
            out.append(op)
        return tuple(out)

    order = tuple(line(stage, ops) for stage, ops in enumerate(schedule.order))
    return replace(schedule, order=order, why=f"{schedule.why}, with all forwards recomputed")


def trial(schedule: Schedule, split: bool, recompute: bool) -> Schedule:
    """Return the order with microbatch 0 in halves (`split`) and made again (`recompute`).

    As far as possible. A job runs it at its very start, so that a planner learns what these ops
    cost. No stage holds more than without them.
    """

    def ops(op: Op) -> Line:
        if op.microbatch or op.kind is not Kind.B:
            return (op,)
        again = (op._replace(kind=Kind.R),) if recompute else ()
        halves = (op._replace(kind=Kind.I), op._replace(kind=Kind.W)) if split else (op,)
        return again + halves

    order = tuple(tuple(one for op in line for one in ops(op)) for line in schedule.order)
    return replace(schedule, order=order, why=f"{schedule.why}, one microbatch on trial")
