"""1F1B, as Megatron runs it: stage i starts `stages - i` forwards before its first backward.

Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (ICML 2021), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_adaptra.errors import BadInput
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan.base import planner, warmup_line


def stock_warmup(stages: int, microbatches: int) -> tuple[int, ...]:
    return tuple(min(stages - i, microbatches) for i in range(stages))


def refuse_chunks(conditions: Conditions, policy: str) -> None:
    """For the planners that know one model chunk per device; raises BadInput."""
    if conditions.chunks > 1:
        allowed = f"{policy} runs 1 chunk per device; policies for more: interleaved, adaptive"
        raise BadInput("chunks", conditions.chunks, allowed)


def first_schedule(stages: int, microbatches: int, budgets: float | Sequence[float]) -> Schedule:
    """What a job starts with: 1F1B, as far as the microbatches in flight that all stages, or each
    of them, may have allow it."""
    each = budgets if isinstance(budgets, Sequence) else [budgets] * stages
    stock = stock_warmup(stages, microbatches)
    least = [min(each[: i + 1]) for i in range(stages)]  # depths do not grow towards the end
    depths = (int(min(depth, budget)) for depth, budget in zip(stock, least, strict=True))
    order = tuple(warmup_line(depth, microbatches) for depth in depths)
    return Schedule(order, microbatches, policy="1f1b", why="1F1B, as Megatron runs it")


@planner("1f1b")
def one_f_one_b(conditions: Conditions, sends: str, time_limit: float | None) -> Schedule:
    refuse_chunks(conditions, "1f1b")
    return first_schedule(conditions.stages, conditions.microbatches, math.inf)
