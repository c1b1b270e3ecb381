"""`warmup`: the lever that Megatron's own schedule has, its warmup depths, and no other.

Warmup depths that absorb the given link delays at the least activations in flight.

While a message is on its way, the stage that sent it can run further forwards, if its warmup is
deep enough: a round trip of c seconds over a link is hidden by `c / (f + b)` more microbatches of
slack, which is the difference of the warmup depths of the two stages (the idea of
Adaptra/PipeMorph, section "adaptive warmup"). That closed form is the start; the simulator judges.
Small cases are searched exhaustively. With several chunks interleaved 1F1B gets deeper, greedily.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_adaptra.base.errors import ScheduleError
from megatron_adaptra.base.units import brief
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Schedule, warmup_line
from megatron_adaptra.plan.link_words import slow_links
from megatron_adaptra.plan.pipeline.base import planner
from megatron_adaptra.plan.pipeline.depths import Depths, DepthSearch
from megatron_adaptra.plan.pipeline.fixed import interleaved, interleaved_line, stock_warmup
from megatron_adaptra.plan.pipeline.search.search_budget import end_of, late
from megatron_adaptra.sim.clock import simulate

STEPS = (1, 2, 4)  # forwards by which a warmup grows at once
GAIN = 1e-3  # share of an iteration that a step has to save
TRIED_OPS, LEAST_TRIES = 150_000, 24  # simulated in all, about 2 s
SMALL = 200  # ops of a job that no limit of time cuts short


@planner("warmup")
def warmup(conditions: Conditions, sends: str, time_limit: float | None) -> Schedule:
    """The fastest warmup depths within the budget, then the shallowest of these.

    With several chunks those of interleaved 1F1B, see `deeper_interleaved`. Never slower
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


def deeper_interleaved(conditions: Conditions, sends: str, end: float = math.inf) -> Schedule:
    """The same forwards and backwards in the same order, with as much more warmup as pays.

    Greedy: the first stages, up to some stage, start a few more forwards, as long as the simulator
    finds that faster under such `sends`, until that `end`. Raises BadInput where Megatron has no
    such schedule.
    """
    stages, count, chunks = conditions.stages, conditions.microbatches, conditions.chunks
    stock = interleaved(conditions, sends, None)

    def schedule(more: Sequence[int]) -> Schedule:
        order = tuple(
            interleaved_line(s, stages, count, chunks, stages, m) for s, m in enumerate(more)
        )
        return replace(stock, order=order)

    def seconds(more: Sequence[int]) -> float:
        if cut and late(end):
            return math.inf
        tried = schedule(more)
        budgets = zip(tried.peak_in_flight(), conditions.activation_budget, strict=True)
        if any(peak > budget for peak, budget in budgets):
            return math.inf
        try:
            # What is posted matters to rendezvous sends only, and takes long to find out.
            program = lower(tried, {} if sends == "eager" else None)
            return simulate(program, conditions, sends).makespan
        except ScheduleError:  # so deep that stages wait for each other
            return math.inf

    best: tuple[int, ...] = (0,) * stages
    ops = 2 * stages * count * chunks
    cut = ops > SMALL
    least = math.inf if cut and late(end) else simulate(lower(stock), conditions, sends).makespan
    left = max(LEAST_TRIES, TRIED_OPS // ops)
    while left > 0:
        moves = [
            tuple(m + step * (s < end) for s, m in enumerate(best))
            for end in range(1, stages + 1)
            for step in STEPS
        ]
        left -= len(moves)
        found = min((seconds(more), sum(more), more) for more in moves)
        if found[0] >= least * (1 - GAIN):
            break
        least, _, best = found
    why = stock.why
    if any(best):
        why = f"interleaved 1F1B, {brief(best)} forwards more than Megatron's warmup"
    return replace(schedule(best), policy="warmup", why=slow_links(conditions) + why)
