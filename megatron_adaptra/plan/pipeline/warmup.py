"""`warmup`: the lever that Megatron's own schedule has, its warmup depths, and no other.

Warmup depths that absorb the given link delays at the least activations in flight.

While a message is on its way, the stage that sent it can run further forwards, if its warmup is
deep enough: a round trip of c seconds over a link is hidden by `c / (f + b)` more microbatches of
slack, which is the difference of the warmup depths of the two stages (the idea of
Adaptra/PipeMorph, section "adaptive warmup"). That closed form is the start; the simulator judges.
Small cases are searched exhaustively.
"""

from __future__ import annotations

from megatron_adaptra.base.units import brief
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.schedule import Schedule, warmup_line
from megatron_adaptra.plan.link_words import slow_links
from megatron_adaptra.plan.pipeline.base import planner
from megatron_adaptra.plan.pipeline.depths import Depths, DepthSearch
from megatron_adaptra.plan.pipeline.fixed.baselines import stock_warmup
from megatron_adaptra.plan.pipeline.interleaved_depths import deeper_interleaved
from megatron_adaptra.plan.pipeline.search.search_budget import end_of


@planner("warmup")
def warmup(conditions: Conditions, sends: str, time_limit: float | None) -> Schedule:
    """The fastest warmup depths within the budget, then the shallowest of these.

    With several chunks those of interleaved 1F1B, see `interleaved_depths.py`. Never slower
    than 1F1B in the simulator where the budget allows 1F1B. Depths never increase towards the last
    stage: a stage cannot wait for a backward that its successor has not begun. `sends`: "eager" or
    "rendezvous"; `time_limit`: seconds, or None for as many as it takes.
    """
    end = end_of(time_limit)
    if conditions.chunks > 1:
        return deeper_interleaved(conditions, sends, end)
    best = DepthSearch(conditions, sends, end).run()
    count = conditions.microbatches
    order = tuple(warmup_line(d, count) for d in best)
    return Schedule(order, count, policy="warmup", why=explain(conditions, best))


def explain(conditions: Conditions, depths: Depths) -> str:
    """The plan in one sentence."""
    stock = stock_warmup(conditions.stages, conditions.microbatches)
    more = [d - s for d, s in zip(depths, stock, strict=True)]
    if not any(more):
        what = "the warmup of 1F1B is deep enough"
    else:
        what = f"warmup {brief(depths)} instead of {brief(stock)}"
    return slow_links(conditions) + what
