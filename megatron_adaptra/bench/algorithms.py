"""The collective plans that a measurement compares, cut into pieces as those of a training are."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_adaptra.bench.allreduce_options import AllReduceOptions
from megatron_adaptra.ir.collective import CollectivePlan, Goal
from megatron_adaptra.model.all_reduce_forms import AllReduce
from megatron_adaptra.plan.collectives.sized import FEWEST_RANKS, MESSAGE, for_gradients, sized
from megatron_adaptra.plan.collectives.sized_shards import for_shards, sharded


def measured_plan(name: str, options: AllReduceOptions, nbytes: int) -> CollectivePlan:
    """The plan of an algorithm, one for every lateness: late ranks are taken for very late.

    Args:
        name: one of AllReduceOptions' algorithms but NATIVE.
        options: whose ranks and ports it is for.
        nbytes: of the buffer.
    """
    ranks, late, ports = options.ranks, options.late_ranks, options.clock()
    halves = options.goal is not Goal.ALL_REDUCE
    if ports is None or not math.isfinite(max(ports.out)):
        if halves:
            return for_shards(options.goal, name, ranks, nbytes)
        return for_gradients(name, ranks, nbytes, late)
    arrival = math.inf if late else 0.0
    job = AllReduce(ranks, nbytes, max(ports.out), ports.delay, MESSAGE, arrival, ports.turn)
    return sharded(options.goal, name, job) if halves else sized(name, job, late)


def possible(name: str, ranks: int, late: Sequence[int]) -> bool:
    """Whether the algorithm `name` has a plan for so many `ranks`, of whom those come `late`."""
    return name not in FEWEST_RANKS or (ranks >= FEWEST_RANKS[name] and len(late) == 1)
