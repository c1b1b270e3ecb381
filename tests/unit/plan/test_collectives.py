"""Builders of collective plans: whatever they are given, every rank has the same sum."""

import random
from functools import reduce
from operator import add

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.in_memory import random_buffers, run_in_memory, without_one_message

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.collective import CollectivePlan
from megatron_adaptra.plan.reductions.builders import (
    direct,
    direct_all_gather,
    direct_reduce_scatter,
    halving_doubling,
    ring,
    ring_all_gather,
    ring_reduce_scatter,
    shares_without,
    sorted_chain,
)
from megatron_adaptra.plan.reductions.stragglar import stragglar

sizes = st.integers(0, 60)
seeds = st.integers(0, 2**32 - 1)


@st.composite
def plans(draw: st.DrawFn) -> CollectivePlan:
    ranks = draw(st.integers(1, 17))
    name = draw(
        st.sampled_from(["ring", "halving-doubling", "sorted-chain", "direct", "stragglar"])
    )
    if name == "stragglar":
        ranks = max(ranks, 4)
        return stragglar(ranks, draw(st.integers(0, ranks - 1)), draw(st.integers(1, 4)))
    if name == "ring":
        return ring(ranks, draw(st.integers(1, 4)))
    if name == "halving-doubling":
        return halving_doubling(ranks)
    pieces = draw(st.integers(1, 6))
    if name == "sorted-chain":
        return sorted_chain(draw(st.permutations(range(ranks))), pieces)
    shares = draw(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks).filter(any))
    return direct(shares, pieces)


@given(plans(), sizes, seeds)
def test_every_rank_has_the_sum(plan, elements, seed):
    rng = random.Random(seed)
    buffers = [[rng.randint(-99, 99) for _ in range(elements)] for _ in range(plan.ranks)]
    sums = [sum(column) for column in zip(*buffers, strict=True)]
    assert run_in_memory(plan, buffers, seed) == [sums] * plan.ranks


halves = st.builds(
    lambda build, ranks, cut: build(ranks, cut),
    st.sampled_from(
        [direct_reduce_scatter, ring_reduce_scatter, direct_all_gather, ring_all_gather]
    ),
    st.integers(1, 17), st.integers(1, 5),
)  # fmt: skip


@given(plans() | halves, st.data())
def test_a_plan_without_one_of_its_messages_is_refused(plan, data):
    """The send, and its share of the receive, are gone: each message of these plans is needed."""
    order = without_one_message(plan, data)
    with pytest.raises(BadInput, match="collective plan"):
        CollectivePlan(order, plan.weights, goal=plan.goal)


@given(plans(), sizes, seeds)
def test_every_rank_has_the_same_bits_in_every_run(plan, elements, seed):
    buffers = random_buffers(random.Random(seed), plan.ranks, elements)
    first = run_in_memory(plan, buffers, seed)
    assert first == [first[0]] * plan.ranks
    assert run_in_memory(plan, buffers, seed + 1) == first


@given(st.data(), st.integers(2, 17), sizes, seeds)
def test_owners_add_in_the_order_of_ranks_under_all_shares(data, ranks, elements, seed):
    late = data.draw(st.sets(st.integers(0, ranks - 1), max_size=ranks - 1))
    shares = data.draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks).filter(any))
    pieces = data.draw(st.integers(1, 9))
    buffers = random_buffers(random.Random(seed), ranks, elements)
    in_order = [reduce(add, column) for column in zip(*buffers, strict=True)]
    for plan in (direct(shares, pieces), direct(shares_without(ranks, list(late)), pieces)):
        assert run_in_memory(plan, buffers, seed) == [in_order] * ranks


@given(st.lists(st.integers(0, 9), min_size=1, max_size=17).filter(any), st.integers(1, 20))
def test_owners_have_their_shares(shares, pieces):
    plan = direct(shares, pieces)
    assert CollectivePlan.parse(plan.text()) == plan
    owned = [0] * len(shares)
    counts = [0] * len(shares)
    for rank, line in enumerate(plan.order):
        for op in line:
            if op.action.value == "S":
                owned[rank] += plan.weights[op.piece]
                counts[rank] += 1
    if len(shares) > 1:
        whole = sum(plan.weights)
        assert [o * sum(shares) for o in owned] == [s * whole for s in shares]
        assert max(counts) == pieces
    assert direct(shares, pieces) is plan  # it is made once


def test_a_late_rank_sends_its_buffer_once_and_adds_nothing():
    plan = direct(shares_without(8, [3]), 4)
    late = plan.order[3]
    assert [op.action.value for op in late] == ["P"] * 28 + ["R"] * 28
    assert all(len(op.ranks) == 1 for op in late)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ring(0), "^ranks 0: .* at least 1"),
        (lambda: ring(3, 0), "^cut 0: "),
        (lambda: sorted_chain([0, 0, 1]), r"^ranks by arrival \[0, 0, 1\]: each rank"),
        (lambda: sorted_chain([0, 1], 0), "^pieces 0: "),
        (lambda: stragglar(3, 0), "^ranks 3: .* at least 4"),
        (lambda: stragglar(4, 4), "^late rank 4: ranks are 0 to 3"),
        (lambda: stragglar(4, 0, 0), "^k 0: "),
        (lambda: direct([0, 0]), r"^shares \[0, 0\]: at least one above 0"),
        (lambda: direct([1, -1]), "^share -1: a? ?.*whole number of at least 0"),
        (lambda: direct([1, 1], 0), "^pieces 0: "),
        (lambda: shares_without(4, [4]), "^late rank 4: ranks are 0 to 3"),
        (lambda: shares_without(2, [0, 1]), r"^late ranks \[0, 1\]: at least one rank"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(BadInput, match=message):
        make()


def test_bad_input_is_named_also_where_an_equal_plan_is_known():
    """To a cache True is 1."""
    direct([1, 1])
    with pytest.raises(BadInput, match=r"^share True: "):
        direct([1, True])
    ring(1, 4)
    with pytest.raises(BadInput, match=r"^ranks True: "):
        ring(True, 4)
