"""Reduce-scatters and all-gathers by plan: whatever they are given, shards are right."""

import random
from functools import reduce
from operator import add

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.in_memory import random_buffers, run_in_memory

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.collective import CollectivePlan, Goal
from megatron_adaptra.plan.reductions.builders import (
    direct_all_gather,
    direct_reduce_scatter,
    ring_all_gather,
    ring_reduce_scatter,
)

SCATTERS = [direct_reduce_scatter, ring_reduce_scatter]
GATHERS = [direct_all_gather, ring_all_gather]
counts = st.integers(1, 17)
pieces = st.integers(1, 5)
sizes = st.integers(0, 13)
seeds = st.integers(0, 2**32 - 1)


def shard(rank: int, size: int) -> slice:
    return slice(rank * size, rank * size + size)


@given(st.sampled_from(SCATTERS), counts, pieces, sizes, seeds)
def test_each_rank_has_the_sum_of_its_shard(build, ranks, cut, size, seed):
    rng = random.Random(seed)
    buffers = [[rng.randint(-99, 99) for _ in range(ranks * size)] for _ in range(ranks)]
    sums = [sum(column) for column in zip(*buffers, strict=True)]
    plan = build(ranks, cut)
    assert plan.goal is Goal.REDUCE_SCATTER
    for rank, held in enumerate(run_in_memory(plan, buffers, seed)):
        assert held[shard(rank, size)] == sums[shard(rank, size)]


@given(st.sampled_from(GATHERS), counts, pieces, sizes, seeds)
def test_every_rank_has_all_shards(build, ranks, cut, size, seed):
    buffers = random_buffers(random.Random(seed), ranks, ranks * size)
    right = [x for rank in range(ranks) for x in buffers[rank][shard(rank, size)]]
    plan = build(ranks, cut)
    assert plan.goal is Goal.ALL_GATHER
    assert run_in_memory(plan, buffers, seed) == [right] * ranks


@given(counts, pieces, sizes, seeds)
def test_direct_adds_in_the_order_of_ranks(ranks, cut, size, seed):
    buffers = random_buffers(random.Random(seed), ranks, ranks * size)
    in_order = [reduce(add, column) for column in zip(*buffers, strict=True)]
    for run in (seed, seed + 1):
        held = run_in_memory(direct_reduce_scatter(ranks, cut), buffers, run)
        for rank in range(ranks):
            assert held[rank][shard(rank, size)] == in_order[shard(rank, size)]


@given(st.sampled_from(SCATTERS + GATHERS), counts, pieces)
def test_a_plan_reads_back_and_is_made_once(build, ranks, cut):
    plan = build(ranks, cut)
    assert CollectivePlan.parse(plan.text(), ranks) == plan
    assert build(ranks, cut) is plan
    assert plan.owners == tuple(rank for rank in range(ranks) for _ in range(cut))


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_each_rank_sends_one_shard_less_than_the_buffer(ranks):
    """Direct or around a ring, which no plan betters after a late rank has come."""
    for build in SCATTERS + GATHERS:
        for line in build(ranks, 3).order:
            sent = sum(len(op.ranks) * op.length for op in line if op.action.sends)
            assert sent == 3 * (ranks - 1)


@pytest.mark.parametrize("build", SCATTERS + GATHERS)
def test_bad_input_is_named(build):
    for ranks, cut, message in (
        (0, 1, "^ranks 0: .* at least 1"),
        (3, 0, "^pieces 0: .* at least 1"),
        (3, 1.5, "^pieces 1.5: "),
    ):
        with pytest.raises(BadInput, match=message):
            build(ranks, cut)
