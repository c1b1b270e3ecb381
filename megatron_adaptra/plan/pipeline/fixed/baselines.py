"""The schedules that others are compared with: 1F1B, GPipe, and one microbatch at a time.

1F1B as Megatron runs it: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (ICML
2021), section 3. GPipe: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using
Pipeline Parallelism" (NeurIPS 2019), section 2.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.schedule import Schedule, warmup_line
from megatron_adaptra.plan.pipeline.base import planner


def stock_warmup(stages: int, microbatches: int) -> tuple[int, ...]:
    """Return 1F1B's warmup depth per stage, of so many `stages`, with so many `microbatches`."""
    return tuple(min(stages - i, microbatches) for i in range(stages))


def refuse_chunks(conditions: Conditions) -> None:
    """Raise BadInput where a policy for one model chunk per device is given more."""
    if conditions.chunks > 1:
        allowed = "it has to be 1 for all policies but warmup, interleaved and adaptive"
        raise BadInput("chunks", conditions.chunks, allowed)


def first_schedule(stages: int, microbatches: int, budgets: float | Sequence[float]) -> Schedule:
    """Return the first schedule of a job of `stages` and `microbatches`: 1F1B, cut to budgets.

    `budgets`: the microbatches in flight that all stages, or each of them, may have.
    """
    each = budgets if isinstance(budgets, Sequence) else [budgets] * stages
    stock = stock_warmup(stages, microbatches)
    least = [min(each[: i + 1]) for i in range(stages)]  # depths do not grow towards the end
    depths = (int(min(depth, budget)) for depth, budget in zip(stock, least, strict=True))
    order = tuple(warmup_line(depth, microbatches) for depth in depths)
    return Schedule(order, microbatches, policy="1f1b", why="1F1B, as Megatron runs it")


@planner("1f1b")
def one_f_one_b(conditions: Conditions, sends: str, time_limit: float | None) -> Schedule:
    """Return 1F1B: stage i starts `stages - i` forwards before its first backward.

    `sends` and `time_limit` do not matter. Raises BadInput for several chunks.
    """
    refuse_chunks(conditions)
    return first_schedule(conditions.stages, conditions.microbatches, math.inf)


@planner("gpipe")
def gpipe(conditions: Conditions, sends: str, time_limit: float | None) -> Schedule:
    """Return GPipe with backwards from microbatch 0 on, as gradients are summed in that order.

    `sends` and `time_limit` do not matter. Raises BadInput for several chunks.
    """
    refuse_chunks(conditions)
    count = conditions.microbatches
    order = (warmup_line(count, count),) * conditions.stages
    return Schedule(order, count, policy="gpipe", why="GPipe: every forward, then every backward")


def one_by_one(conditions: Conditions) -> Schedule:
    """Return a schedule in which a stage ends a microbatch, backward too, before the next one."""
    chunks, count = range(conditions.chunks), conditions.microbatches
    line: list[Op] = []
    for k in range(count):
        line += [Op(Kind.F, k, chunk) for chunk in chunks]
        for chunk in reversed(chunks):
            halves = (Kind.I, Kind.W) if conditions.split else (Kind.B,)
            line += [Op(kind, k, chunk) for kind in halves]
    return Schedule((tuple(line),) * conditions.stages, count, conditions.chunks)
