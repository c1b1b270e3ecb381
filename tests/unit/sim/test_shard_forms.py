"""Closed forms of reduce-scatters and all-gathers against the clock of ports."""

from __future__ import annotations

import random

import pytest
from seeding import new_seed

from benchmarks.common import equal_ports
from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.collective import Goal
from megatron_adaptra.model.all_reduce_forms import (
    SHARDED,
    AllReduce,
    best_shard_pieces,
    shard_seconds,
)
from megatron_adaptra.plan.reductions.builders import sharded_plan
from megatron_adaptra.plan.reductions.sized import for_shards
from megatron_adaptra.sim.ports import run_on_ports

HALVES = (Goal.REDUCE_SCATTER, Goal.ALL_GATHER)
MB = 1_000_000


def by_clock(plan, job: AllReduce, late: float = 0.0) -> float:
    ports = equal_ports([job.rate] * job.ranks, job.delay, job.cost)
    arrivals = [0.0] * (job.ranks - 1) + [late]
    return run_on_ports(plan, int(job.nbytes), ports, arrivals).after_arrival


@pytest.mark.parametrize("goal", HALVES)
@pytest.mark.parametrize("algorithm", SHARDED)
def test_the_forms_are_what_the_clock_says(goal, algorithm):
    rng = random.Random(new_seed())
    for _ in range(15):
        nbytes = rng.choice([1e6, 1e7, 1e8])
        buffer = nbytes / 1e8
        delay, cost = buffer * rng.choice([0, 1e-3, 0.1, 1]), buffer * rng.choice([1e-4, 1e-2])
        job = AllReduce(rng.choice([1, 2, 3, 4, 7, 8, 16]), nbytes, 1e8, delay, cost)
        pieces = rng.choice([1, 2, 4])
        plan = sharded_plan(goal, algorithm, job.ranks, pieces)
        seconds = shard_seconds(algorithm, job, pieces)
        assert by_clock(plan, job) == pytest.approx(seconds, rel=1e-3)
        for late in (0.1 * buffer, buffer, 20 * buffer):
            assert by_clock(plan, job, late) <= seconds * 1.001


@pytest.mark.parametrize("goal", HALVES)
def test_no_plan_saves_a_late_rank_any_bytes(goal):
    """It sends seven of eight shards after it has come, 140 ms of its port."""
    job = AllReduce(8, 8 * MB, 50e6)
    for algorithm in SHARDED:
        plan = sharded_plan(goal, algorithm, job.ranks, best_shard_pieces(algorithm, job))
        for late in (0.0, 0.16, 10.0):
            assert by_clock(plan, job, late) == pytest.approx(0.14, rel=0.01)


def test_a_ring_of_shards_is_cut_where_a_delay_hides_behind_pieces():
    jobs = [AllReduce(8, n * MB, 50e6, 0.01, 1e-4) for n in (1, 8)]
    assert [best_shard_pieces("ring", job) for job in jobs] == [4, 2]
    assert best_shard_pieces("ring", AllReduce(8, MB, 50e6, 0.0, 1e-3)) == 1
    assert [best_shard_pieces("direct", job) for job in jobs] == [1, 1]


def test_nothing_known_of_the_network():
    for goal in HALVES:
        for algorithm in SHARDED:
            plan = for_shards(goal, algorithm, 4, 8 * MB)
            assert (plan.goal, plan.name, plan.ranks) == (goal, algorithm, 4)
            assert for_shards(goal, algorithm, 4, 8 * MB) is plan


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: shard_seconds("stragglar", AllReduce(4, 1, 1.0), 1), "^algorithm 'stragglar'"),
        (lambda: best_shard_pieces("tree", AllReduce(4, 1, 1.0)), "^algorithm 'tree'"),
        (
            lambda: for_shards(Goal.REDUCE_SCATTER, "stragglar", 4, 1),
            "^reduce-scatter 'stragglar': ring and direct have",
        ),
        (lambda: for_shards(Goal.ALL_REDUCE, "ring", 4, 1), "^all-reduce 'ring'"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(BadInput, match=message):
        make()
