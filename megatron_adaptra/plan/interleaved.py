"""Interleaved 1F1B, as Megatron runs it: several model chunks per device, depth first.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM" (SC 2021), section 2.2. The model goes round the devices once per chunk, so that a
device's share of the warmup shrinks with the number of chunks, for as many times the messages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_adaptra.errors import BadInput, ScheduleError
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Line, Schedule
from megatron_adaptra.plan.base import planner, slow_links
from megatron_adaptra.plan.search_budget import late
from megatron_adaptra.sim.clock import simulate

STEPS = (1, 2, 4)  # forwards by which a warmup grows at once
GAIN = 1e-3  # share of an iteration that a step has to save
TRIED_OPS, LEAST_TRIES = 150_000, 24  # simulated in all, about 2 s
SMALL = 200  # ops of a job that no limit of time cuts short


@planner("interleaved")
def interleaved(conditions: Conditions, sends: str, time_limit: float | None) -> Schedule:
    """What Megatron runs; raises BadInput where Megatron refuses too.

    `sends` and `time_limit` do not matter.
    """
    stages, count, chunks = conditions.stages, conditions.microbatches, conditions.chunks
    if chunks == 1:
        raise BadInput("chunks", chunks, "interleaved needs at least 2; with 1 it is policy 1f1b")
    if stages == 1:
        raise BadInput("stages", stages, "interleaved needs at least 2")
    if count % stages:
        allowed = f"interleaved takes multiples of the number of stages, here {stages}"
        raise BadInput("microbatches", count, allowed)
    order = tuple(interleaved_line(stage, stages, count, chunks, stages) for stage in range(stages))
    why = f"interleaved 1F1B with {chunks} chunks per device, as Megatron runs it"
    return Schedule(order, count, chunks, policy="interleaved", why=why)


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
        why = f"interleaved 1F1B, {','.join(map(str, best))} forwards more than Megatron's warmup"
    return replace(schedule(best), policy="warmup", why=slow_links(conditions) + why)


def interleaved_line(
    stage: int, stages: int, microbatches: int, chunks: int, group: int, more: int = 0
) -> Line:
    """A group of `group` microbatches goes through all chunks before the next group starts.

    The line of `stage`, of so many `stages` with so many `chunks` each, for so many `microbatches`.
    The backwards do the same from the last chunk to the first. The warmup lets the first group
    reach its last chunk everywhere, and then the usual triangle, twice as steep as that of 1F1B.
    `more`: forwards that the warmup has beyond Megatron's.
    """
    groups = [
        range(first, min(first + group, microbatches)) for first in range(0, microbatches, group)
    ]
    forwards, backwards = (
        [
            Op(kind, k, chunk)
            for members in groups
            for chunk in way
            for k in members
        ]
        for kind, way in (
            (Kind.F, range(chunks)),
            (Kind.B, range(chunks - 1, -1, -1)),
        )
    )  # fmt: skip
    warmup = min(2 * (stages - stage - 1) + (chunks - 1) * group + more, len(forwards))
    line = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        line += [forward, backward]
    return tuple(line + backwards[len(forwards) - warmup :])
