"""Reduce-scatters and all-gathers: what the check proves of them, and what it refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.collective import CollectiveOp, CollectivePlan, Goal
from megatron_adaptra.plan.reductions.builders import (
    direct,
    direct_all_gather,
    direct_reduce_scatter,
    ring,
    ring_all_gather,
    ring_reduce_scatter,
)

SCATTER, GATHER = Goal.REDUCE_SCATTER, Goal.ALL_GATHER


def made(goal: Goal, *lines: str, weights: tuple[int, ...]) -> CollectivePlan:
    order = tuple(tuple(CollectiveOp.parse(op) for op in line.split()) for line in lines)
    return CollectivePlan(order, weights, "by hand", "a test", goal)


HALVES = {
    SCATTER: ("P1>1 A0=0+1", "P0>0 A1=0+1"),
    GATHER: ("S0>1 R1<1", "S1>0 R0<0"),
}


@pytest.mark.parametrize("goal", HALVES)
def test_a_plan_reads_back_with_its_goal(goal):
    plan = made(goal, *HALVES[goal], weights=(2, 2))
    assert f'"goal": "{goal.value}"' in plan.text()
    again = CollectivePlan.parse(plan.text(), 2)
    assert (again, again.goal, again.digest()) == (plan, goal, plan.digest())


def test_an_all_reduce_has_the_text_that_it_had_before_there_were_goals():
    assert "goal" not in direct([1, 1]).text()
    assert direct([1, 1]).owners == ()


@pytest.mark.parametrize(
    ("goal", "lines", "message"),
    [
        (SCATTER, ("P1>1", "A1=0+1"), r"piece 0 of rank 0.*ends without the part of rank 1"),
        (
            SCATTER,
            ("P0>1 A1=0+1", "P1>0 A0=0+1"),
            r"piece 0 of rank 0.*ends without the part of rank 1",
        ),
        (
            SCATTER,
            ("P0-1>1 A0-1=0+1", "P0-1>0 A0-1=0+1"),
            r"piece 0 of rank 1.*has the sum of the shard of rank 0",
        ),
        (SCATTER, ("P1>1 A0=0+1 S0>1", "P0>0 A1=0+1 R0<0"), "has the sum of the shard of rank 0"),
        (
            SCATTER,
            ("P1>1 R0<1", "P0>0 A1=0+1 S0>0"),
            r"P0>0 of rank 1, piece 0.*rank 0 does not receive it",
        ),
        (GATHER, ("S0>1", "R0<0"), r"piece 1 of rank 0.*ends without the shard of rank 1"),
        (GATHER, ("S1>1 R1<1", "S1>0 R1<0"), r"S1>1 of rank 0, piece 1.*does not have it yet"),
        (GATHER, ("P0>1 R1<1", "S1>0 A0=0+1"), r"P0>1 of rank 0.*an all-gather adds nothing"),
        (GATHER, ("S0>1 A1=0+1", "P1>0 R0<0"), r"A1=0\+1 of rank 0.*an all-gather adds nothing"),
        (GATHER, ("R1<1 S0>1", "R0<0 S1>0"), r"hangs under eager and rendezvous sends"),
        (GATHER, ("S0>1 R1<1", "S1>0 R0<0 S1>0"), r"S1>0 of rank 1.* a second time"),
    ],
)
def test_what_does_not_come_to_its_goal_is_refused_in_words(goal, lines, message):
    with pytest.raises(BadInput, match=message):
        made(goal, *lines, weights=(1, 1))


@pytest.mark.parametrize("goal", HALVES)
@pytest.mark.parametrize(
    ("weights", "piece"), [((1, 2), 1), ((2, 1), 0), ((3,), 0), ((1, 3, 1), 1)]
)
def test_a_piece_in_two_shards_is_refused(goal, weights, piece):
    with pytest.raises(BadInput, match=rf"weights .piece {piece}.: each of 2 equal shards"):
        made(goal, "", "", weights=weights)


def test_owners_are_those_of_equal_shards_however_they_are_cut():
    lines = ("P2-4>1 A0-1=0+1", "P0-1>0 A2-4=0+1")
    plan = made(SCATTER, *lines, weights=(3, 3, 1, 4, 1))
    assert plan.owners == (0, 0, 1, 1, 1)
    for elements in (0, 2, 8, 26):
        assert plan.bounds(elements)[2] == elements // 2


PLANS = {
    Goal.ALL_REDUCE: (lambda n, k: direct([1] * n, k), ring),
    SCATTER: (direct_reduce_scatter, ring_reduce_scatter),
    GATHER: (direct_all_gather, ring_all_gather),
}


@pytest.mark.parametrize("goal", PLANS)
@given(st.data())
def test_a_plan_of_one_goal_is_refused_as_another(goal, data):
    ranks, pieces = data.draw(st.integers(2, 9)), data.draw(st.integers(1, 3))
    plan = data.draw(st.sampled_from(PLANS[goal]))(ranks, pieces)
    for other in set(Goal) - {goal}:
        with pytest.raises(BadInput, match="collective plan"):
            CollectivePlan(plan.order, plan.weights, goal=other)


@pytest.mark.parametrize(
    "goal", ['"broadcast"', "1", "null", '["all-gather"]'], ids=lambda one: one[:6]
)
def test_a_goal_that_there_is_not_is_refused(goal):
    text = made(GATHER, *HALVES[GATHER], weights=(1, 1)).text()
    with pytest.raises(BadInput, match=r"collective plan's goal .* one of all-reduce, reduce-"):
        CollectivePlan.parse(text.replace('"all-gather"', goal))
