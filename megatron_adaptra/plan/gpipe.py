"""GPipe: every forward, then every backward.

Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism" (NeurIPS 2019), section 2.3.
"""

from __future__ import annotations

from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan.base import planner, warmup_line
from megatron_adaptra.plan.one_f_one_b import refuse_chunks


@planner("gpipe")
def gpipe(conditions: Conditions, sends: str, time_limit: float | None) -> Schedule:
    """Backwards start with microbatch 0, as gradients are summed in microbatch order here."""
    refuse_chunks(conditions, "gpipe")
    count = conditions.microbatches
    order = (warmup_line(count, count),) * conditions.stages
    return Schedule(order, count, policy="gpipe", why="GPipe: every forward, then every backward")
