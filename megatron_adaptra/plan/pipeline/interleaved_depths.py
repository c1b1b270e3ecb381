"""The search for warmup depths where stages have several chunks: interleaved 1F1B, deeper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_adaptra.base.errors import ScheduleError
from megatron_adaptra.base.units import brief
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan.link_words import slow_links
from megatron_adaptra.plan.pipeline.fixed.interleaved import interleaved, interleaved_line
from megatron_adaptra.plan.pipeline.search.search_budget import late
from megatron_adaptra.sim.clock import simulate

STEPS = (1, 2, 4)  # forwards by which a warmup grows at once
GAIN = 1e-3  # share of an iteration that a step has to save
TRIED_OPS, LEAST_TRIES = 150_000, 24  # simulated in all, about 2 s
SMALL = 200  # ops of a job that no limit of time cuts short


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
