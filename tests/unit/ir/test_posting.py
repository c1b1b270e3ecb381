"""Receives that stand posted: enough that no order hangs, and no number that is merely large."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir.served import posted_ahead
from ir.strategies import of_depths, random_depths, random_schedule, seeds

from benchmarks.common import both_ways
from megatron_adaptra.base.errors import ScheduleError
from megatron_adaptra.ir.check import check
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.program import links_ahead, lower
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.sim.clock import simulate

shapes = st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(1, 3))


@settings(max_examples=150)
@given(seeds, shapes)
def test_no_order_hangs(seed, shape):
    """`check` tries sends that wait until their receive is posted, the strictest there are."""
    rng = random.Random(seed)
    schedule = random_schedule(rng, *shape, split=rng.random(), again=rng.random() / 2)
    check(lower(schedule))


def hangs(schedule: Schedule, ahead: int) -> bool:
    try:
        check(lower(schedule, ahead))
    except ScheduleError:
        return True
    return False


@pytest.mark.parametrize("seed", range(5))
def test_with_one_receive_per_link_most_orders_hang(seed):
    rng = random.Random(seed)
    orders = [random_schedule(rng, rng.randint(2, 4), rng.randint(3, 6)) for _ in range(20)]
    assert sum(hangs(order, 1) for order in orders) > 10


@given(seeds, shapes)
def test_every_link_has_a_receive_and_none_many_more_than_messages(seed, shape):
    stages, count, chunks = shape
    schedule = random_schedule(random.Random(seed), *shape)
    depths = posted_ahead(schedule)
    ways = {(i, (i + 1) % stages) for i in range(stages - (chunks == 1))}
    assert set(depths) == {way for a, b in ways for way in ((a, b), (b, a)) if a != b}
    assert all(1 <= depth <= count * chunks + 1 for depth in depths.values())


@given(seeds, st.integers(1, 6), st.integers(1, 14))
def test_warmups_of_1f1b_kind_need_slack_and_one(seed, stages, count):
    depths = random_depths(random.Random(seed), stages, count)
    assert posted_ahead(of_depths(depths, count)) == links_ahead(depths)


@pytest.mark.parametrize("above", [1, 2, 3])
@pytest.mark.parametrize("slack", [1, 2, 4, 6])
@pytest.mark.parametrize("back", [False, True])
def test_one_receive_less_is_slower_over_a_slow_link(above, slack, back):
    """One that has run ahead of its place in line is posted a round trip too late."""
    depths, count = (*range(slack + above + 1, slack + 1, -1), 2), slack + 2
    ones, link = (1.0,) * (above + 1), (above - 1, above)
    c = Conditions(count, ones, ones, ones, both_ways({above - 1: 20.0}))
    schedule, ahead = of_depths(depths, count), links_ahead(depths)
    way = link[::-1] if back else link
    assert ahead[way] == slack + 1

    def seconds(receives: int) -> float:
        return simulate(lower(schedule, {**ahead, way: receives}), c, "rendezvous").makespan

    assert seconds(slack) > 1.05 * seconds(slack + 1)
    assert seconds(slack + 2) == seconds(slack + 1)
