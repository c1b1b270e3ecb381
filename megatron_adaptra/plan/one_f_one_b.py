"""1F1B, as Megatron runs it: stage i starts `stages - i` forwards before its first backward.

Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (ICML 2021), section 3.
"""

from __future__ import annotations

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


@planner("1f1b")
def one_f_one_b(conditions: Conditions, sends: str, time_limit: float | None) -> Schedule:
    refuse_chunks(conditions, "1f1b")
    count = conditions.microbatches
    order = tuple(warmup_line(d, count) for d in stock_warmup(conditions.stages, count))
    return Schedule(order, count, policy="1f1b", why="1F1B, as Megatron runs it")
