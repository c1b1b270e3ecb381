"""A reduce-scatter or an all-gather of equal shards, and in how many pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.collective import CollectivePlan, Goal
from megatron_adaptra.model.all_reduce_forms import AllReduce
from megatron_adaptra.model.shard_forms import SHARDED, best_shard_pieces
from megatron_adaptra.plan.reductions.sharded import (
    direct_all_gather,
    direct_reduce_scatter,
    ring_all_gather,
    ring_reduce_scatter,
)
from megatron_adaptra.plan.reductions.sized import MESSAGE, PORT
from megatron_adaptra.sim.ports import Ports

_BUILDERS: Mapping[tuple[Goal, str], Callable[[int, int], CollectivePlan]] = {
    (Goal.REDUCE_SCATTER, "direct"): direct_reduce_scatter,
    (Goal.REDUCE_SCATTER, "ring"): ring_reduce_scatter,
    (Goal.ALL_GATHER, "direct"): direct_all_gather,
    (Goal.ALL_GATHER, "ring"): ring_all_gather,
}


def sharded(goal: Goal, algorithm: str, job: AllReduce, pieces: int = 0) -> CollectivePlan:
    """The plan of `algorithm` for `job`: equal arguments, equal plans.

    Args:
        goal: a reduce-scatter or an all-gather.
        algorithm: one of SHARDED of model/shard_forms.py.
        job: what is reduced or gathered, over which ports.
        pieces: into which each shard is cut, instead of the best.

    Raises:
        BadInput: a goal or an algorithm without such a plan.
    """
    if (goal, algorithm) not in _BUILDERS:
        allowed = f"{' and '.join(SHARDED)} have a reduce-scatter and an all-gather"
        raise BadInput(goal.value, algorithm, allowed)
    count = pieces or best_shard_pieces(algorithm, job)
    return sharded_plan(goal, algorithm, job.ranks, count)


def sharded_plan(goal: Goal, algorithm: str, ranks: int, pieces: int) -> CollectivePlan:
    """The plan of `algorithm` for so many `ranks`, each shard in so many `pieces`.

    `goal`: a reduce-scatter or an all-gather.
    """
    return _BUILDERS[goal, algorithm](ranks, pieces)


def for_shards(goal: Goal, algorithm: str, ranks: int, nbytes: int) -> CollectivePlan:
    """The plan of `algorithm` for a bucket of `nbytes`, where nothing is known of the network.

    `goal`, `algorithm`, BadInput: as of `sharded`. `ranks`: how many.
    """
    return sharded(goal, algorithm, AllReduce(ranks, nbytes, PORT, cost=MESSAGE))


def shard_pieces(nbytes: int, ports: Ports) -> dict[str, int]:
    """By algorithm of SHARDED, into how many pieces each shard of a buffer is best cut.

    `nbytes`: of the buffer. `ports`: of all ranks.
    """
    slowest = min(*ports.out, *ports.into)  # as if all were alike, as the closed forms know them
    job = AllReduce(len(ports.out), nbytes, slowest, ports.delay, ports.cost)
    return {name: best_shard_pieces(name, job) for name in SHARDED}
