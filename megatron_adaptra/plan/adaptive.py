"""Warmup depths that absorb the given link delays at the least activations in flight.

While a message is on its way, the stage that sent it can run further forwards, if its warmup is
deep enough: a round trip of c seconds over a link is hidden by `c / (f + b)` more microbatches of
slack between the two stages (the idea of Adaptra/PipeMorph, section "adaptive warmup"). That closed
form is the start; the simulator judges. Small cases are searched exhaustively.
"""

from __future__ import annotations

import math

from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan.base import planner, warmup_line
from megatron_adaptra.plan.one_f_one_b import stock_warmup
from megatron_adaptra.plan.search import Depths, Search


@planner("adaptive")
def adaptive(conditions: Conditions, sends: str = "eager") -> Schedule:
    """The fastest warmup depths within the budget, then the shallowest of these.

    Never slower than 1F1B in the simulator where the budget allows 1F1B. Depths never increase
    towards the last stage: a stage cannot wait for a backward that its successor has not begun.
    """
    best = Search(conditions, sends).run()
    count = conditions.microbatches
    order = tuple(warmup_line(d, count) for d in best)
    return Schedule(order, count, policy="adaptive", why=explain(conditions, best))


def explain(conditions: Conditions, depths: Depths) -> str:
    """The plan in one sentence."""
    slow = [
        f"{a}->{b} {1e3 * link.delay:.3g} ms"
        + (f" at {link.bandwidth / 1e6:.3g} MB/s" if math.isfinite(link.bandwidth) else "")
        for (a, b), link in sorted(conditions.links.items())
        if link.delay > 0 or math.isfinite(link.bandwidth)
    ]
    stock = stock_warmup(conditions.stages, conditions.microbatches)
    more = [d - s for d, s in zip(depths, stock, strict=True)]
    if not any(more):
        what = "the warmup of 1F1B is deep enough"
    else:
        what = "warmup " + ",".join(map(str, depths)) + " instead of " + ",".join(map(str, stock))
    return (f"slow links {'; '.join(slow)}: " if slow else "no slow link: ") + what
