"""The handcrafted zero-bubble schedules: weight gradients wait, and fill what would be idle.

Source: Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024), sections 2.1 (ZB-H1) and 2.2
(ZB-H2). Both run the triangle of 1F1B, but send a gradient upwards as soon as its half of the
backward is done. Stage i owes `delay` weight gradients throughout and works them off at the end,
just when 1F1B would idle.
"""

from __future__ import annotations

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.schedule import Line, Schedule
from megatron_adaptra.plan.pipeline.base import planner
from megatron_adaptra.plan.pipeline.fixed.baselines import refuse_chunks


@planner("zb-h1")
def zb_h1(conditions: Conditions, sends: str, time_limit: float | None) -> Schedule:
    """The warmup of 1F1B, and no device holds more than the first one does under 1F1B.

    `sends` and `time_limit` do not matter. Raises BadInput for chunks or whole backwards.
    """
    order = _order(conditions, "zb-h1", 1)
    why = "ZB-H1: 1F1B whose weight gradients fill the end, in the memory of 1F1B's first stage"
    return Schedule(order, conditions.microbatches, policy="zb-h1", why=why)


@planner("zb-h2")
def zb_h2(conditions: Conditions, sends: str, time_limit: float | None) -> Schedule:
    """Nearly twice the warmup: no bubble where F, I and W take equally long.

    `sends` and `time_limit` do not matter. Raises BadInput for chunks or whole backwards.
    """
    order = _order(conditions, "zb-h2", 2)
    why = "ZB-H2: weight gradients fill all bubbles, in nearly twice the memory of 1F1B"
    return Schedule(order, conditions.microbatches, policy="zb-h2", why=why)


def _order(conditions: Conditions, policy: str, steepness: int) -> tuple[Line, ...]:
    """`steepness`: forwards by which the warmup grows from one stage to the one before it."""
    refuse_chunks(conditions)
    if not conditions.split:
        allowed = "policies zb-h1 and zb-h2 split every backward; 1f1b does not"
        raise BadInput("split", conditions.split, allowed)
    last = conditions.stages - 1
    return tuple(
        zero_bubble_line(1 + steepness * (last - i), steepness * i, conditions.microbatches)
        for i in range(conditions.stages)
    )


def zero_bubble_line(depth: int, delay: int, microbatches: int) -> Line:
    """`depth` forwards; then I, the W of `delay` microbatches before, and F in turn.

    The line of one stage, for so many `microbatches`. With depth + delay the same on all stages, so
    are the microbatches that are not done with.
    """
    line = [Op(Kind.F, k) for k in range(min(depth, microbatches))]
    for k in range(microbatches):
        line.append(Op(Kind.I, k))
        if k >= delay:
            line.append(Op(Kind.W, k - delay))
        if depth + k < microbatches:
            line.append(Op(Kind.F, depth + k))
    line += [Op(Kind.W, k) for k in range(max(0, microbatches - delay), microbatches)]
    return tuple(line)
