"""Which reduce-scatter or all-gather of equal shards, and in how many pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.collective import CollectivePlan, Goal
from megatron_adaptra.model.all_reduce_forms import AllReduce
from megatron_adaptra.model.shard_forms import SHARDED, best_shard_pieces
from megatron_adaptra.plan.collectives.sharded import (
    direct_all_gather,
    direct_reduce_scatter,
    ring_all_gather,
    ring_reduce_scatter,
)
from megatron_adaptra.plan.collectives.sized import MESSAGE, PORT
from megatron_adaptra.sim.ports import Ports, run_on_ports

# What `direct` has to gain over a ring: as much as the clock flatters it, in which messages of all
# to all do not disturb each other in a receiver's queue (docs/evidence/allreduce.md).
CERTAIN = 0.1
MOST_RANKS = 128  # plans of more take too long to judge; a ring then
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
    job = _job(nbytes, ports)
    return {name: best_shard_pieces(name, job) for name in SHARDED}


def fastest_sharded(
    goal: Goal, nbytes: int, ports: Ports, lateness: Sequence[float] = ()
) -> CollectivePlan:
    """The plan with the least time from the last arrival to the last end, by the clock of ports.

    A ring unless `direct` clearly gains: it crosses one delay instead of N - 1, and sends no fewer
    bytes, so that it gains where a shard takes less of a port than a delay does.

    Args:
        goal: a reduce-scatter or an all-gather.
        nbytes: of the buffer.
        ports: of all ranks.
        lateness: seconds, by rank; none is late by default.

    Raises:
        BadInput: another goal, or another number of arrivals than of ports.
    """
    job = _job(nbytes, ports)
    ring = sharded(goal, "ring", job)
    if job.ranks > MOST_RANKS:
        return ring
    direct = sharded(goal, "direct", job)
    seconds = [run_on_ports(x, nbytes, ports, lateness).after_arrival for x in (ring, direct)]
    return direct if seconds[0] > (1 + CERTAIN) * seconds[1] else ring


def _job(nbytes: int, ports: Ports) -> AllReduce:
    """As the closed forms know it, whose ports are all alike: the slowest one's."""
    slowest = min(*ports.out, *ports.into)
    return AllReduce(len(ports.out), nbytes, slowest, ports.delay, ports.cost)
