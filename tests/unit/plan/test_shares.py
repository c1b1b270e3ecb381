"""Counts of microbatches by speed: the best there are, by trying all; and the bound below them."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.sync import SyncPlan
from megatron_adaptra.plan.shares.counts import (
    Speed,
    least_counts,
    least_seconds,
    share_by_speed,
    shares_in_words,
)

# Whole seconds, so that ties are ties; few, so that there are many.
SPEEDS = st.lists(
    st.builds(Speed, st.integers(1, 4), st.integers(0, 6)), min_size=1, max_size=4
)  # fmt: skip


def all_counts(replicas, total):
    for cuts in itertools.combinations(range(1, total), replicas - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))


def rank(counts, costs, microbatches):
    """As `least_counts` promises it."""
    seconds = [cost(count) for cost, count in zip(costs, counts, strict=True)]
    away = sum(max(0, microbatches - count) for count in counts)
    return max(seconds), away, sum(count**2 for count in counts)


@given(st.lists(st.lists(st.integers(0, 3), min_size=20, max_size=20), min_size=1, max_size=4),
       st.integers(1, 5), st.data())  # fmt: skip
def test_no_counts_are_better(steps, microbatches, data):
    """Costs with flat parts and jumps, and some that no time is enough for, as for want of memory.

    A replica has room for its own.
    """
    rows = [list(itertools.accumulate(row)) for row in steps]
    for row in rows:
        room = data.draw(st.integers(microbatches, 20))
        row[room:] = [math.inf] * (20 - room)
    costs = [lambda count, row=row: row[count - 1] for row in rows]
    counts = least_counts(costs, microbatches)
    found = list(all_counts(len(rows), len(rows) * microbatches))
    assert rank(counts, costs, microbatches) == min(rank(c, costs, microbatches) for c in found)
    start = data.draw(st.sampled_from(found))
    if rank(start, costs, microbatches)[0] < math.inf:
        assert least_counts(costs, microbatches, start) == counts


@given(SPEEDS, st.integers(1, 5))
def test_the_bound_is_below_all_counts_and_met_where_parts_are_whole(speeds, microbatches):
    plan = share_by_speed(speeds, microbatches, step=2.0)
    assert plan.bound <= plan.predicted * (1 + 1e-12)
    assert plan.predicted <= plan.full
    assert plan.gain == plan.full / plan.predicted
    # With parts: each replica has as many as fit until the bound, and that is all of them.
    until = plan.bound - 2.0
    parts = [(until - speed.outside) / speed.per_microbatch for speed in speeds]
    assert all(part >= 1 - 1e-9 for part in parts)
    total = len(speeds) * microbatches
    assert sum(parts) >= total * (1 - 1e-9)
    if all(part > 1 + 1e-9 for part in parts):  # else one is held up by its only microbatch
        assert sum(parts) == pytest.approx(total)


def test_half_speed_in_one_of_four():
    plan = share_by_speed([Speed(1.0), Speed(1.0), Speed(2.0), Speed(1.0)], 8)
    assert plan.sync.counts == (9, 9, 5, 9)
    assert (plan.predicted / plan.full, plan.full) == (0.625, 16.0)
    assert plan.bound / plan.full == pytest.approx(0.5714, abs=1e-4)
    assert plan.seconds == (9, 9, 10, 9)


def test_what_counts_do_not_change_is_outside():
    """A replica that starts 4 s late has 4 microbatches less time, but is not slower."""
    plan = share_by_speed([Speed(1.0, 4.0), Speed(1.0), Speed(1.0)], 8)
    assert plan.sync.counts == (6, 9, 9)
    assert (plan.full, plan.predicted) == (12, 10)


@given(st.integers(1, 6), st.integers(1, 20), st.floats(1e-4, 1e3), st.floats(0, 10))
def test_equal_replicas_keep_what_they_have(replicas, microbatches, seconds, outside):
    plan = share_by_speed([Speed(seconds, outside)] * replicas, microbatches)
    assert plan.sync.full
    assert plan.gain == 1


@given(SPEEDS)
def test_with_one_microbatch_per_replica_nothing_can_be_moved(speeds):
    assert share_by_speed(speeds, 1).sync.full


def test_rounding_moves_nothing():
    """0.1 + 0.2 is not 0.3 for a computer, and still no gain."""
    costs = [lambda m: 0.1 * m, lambda m: 0.3 * m / 3, lambda m: m / 10.0]
    for microbatches in range(1, 50):
        assert least_counts(costs, microbatches) == (microbatches,) * 3
    assert 0.15 * 4 < 0.2 * 3  # which are the same
    assert least_counts([lambda m: 0.2 * m, lambda m: 0.15 * m], 3) == (3, 3)


def test_costs_that_fall_are_taken_as_they_are():
    """A search may find a better schedule for more microbatches; counts still add up."""
    odd = {1: 5.0, 2: 4.0, 3: 6.0, 4: 1.0, 5: 9.0}
    counts = least_counts([lambda m: odd.get(m, 9.0), lambda m: 3.0 * m, lambda m: 0.5 * m], 2)
    SyncPlan(2, counts)


@pytest.mark.parametrize(
    ("speeds", "microbatches", "words"),
    [
        ([], 8, "at least 1 replica"),
        ([Speed(1.0)], 0, "microbatches per replica 0"),
        ([Speed(1.0), Speed(0.0)], 8, "microbatch of replica 1 0.0"),
        ([Speed(math.inf)], 8, "microbatch of replica 0 inf"),
        ([Speed(1.0, -1.0)], 8, "seconds outside of replica 0 -1.0"),
    ],
)
def test_what_no_replica_takes_is_refused(speeds, microbatches, words):
    with pytest.raises(BadInput) as caught:
        share_by_speed(speeds, microbatches)
    assert words in str(caught.value)
    with pytest.raises(BadInput):
        least_seconds(speeds, microbatches)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((8, 8), "each replica runs its own 8 microbatches"),
        ((1,), "each replica runs its own 1 microbatch"),
        ((9, 9, 5, 9), "replica 2 runs 5 microbatches, replicas 0, 1 and 3 run 9 microbatches, "
                       "instead of 8 each"),
        ((3, 1), "replica 1 runs 1 microbatch, replica 0 runs 3 microbatches, instead of 2 each"),
        ((9,) * 7 + (1,), "replica 7 runs 1 microbatch, 7 replicas run 9 microbatches, "
                          "instead of 8 each"),
    ],
)  # fmt: skip
def test_counts_in_words(counts, words):
    assert shares_in_words(SyncPlan(sum(counts) // len(counts), counts)) == words
