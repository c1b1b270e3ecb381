"""Shares of microbatches: each sample once, each with the same weight, whatever the counts."""

from fractions import Fraction
from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.sync import MOST_PAIRS, SyncPlan, check_sync, parse_sync


@st.composite
def plans(draw, least=1, most=9, microbatches=20):
    """Any counts of at least 1: all else of the global batch is cut at random places."""
    n, each = draw(st.integers(least, most)), draw(st.integers(1, microbatches))
    cuts = sorted(draw(st.lists(st.integers(0, n * each - n), min_size=n - 1, max_size=n - 1)))
    ends = [0, *cuts, n * each - n]
    return SyncPlan(each, tuple(1 + b - a for a, b in pairwise(ends)))


def refused(call, *args) -> str:
    with pytest.raises(BadInput) as caught:
        call(*args)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def parts(plan: SyncPlan) -> tuple[list[list[tuple[int, int]]], list[Fraction]]:
    replicas = range(plan.replicas)
    return [list(plan.share(r)) for r in replicas], [plan.weight(r) for r in replicas]


# --- which microbatches --------------------------------------------------------------------------


@given(plans())
def test_every_sample_is_counted_once(plan):
    """Independently of the checker: by the mean of losses that are all different."""
    losses = {(h, j): 3 ** (h * plan.microbatches + j) for h, j in chain(*parts(plan)[0])}
    assert len(losses) == plan.total
    means = [
        Fraction(sum(losses[pair] for pair in plan.share(r)), plan.counts[r])
        for r in range(plan.replicas)
    ]
    weighted = sum(plan.weight(r) * mean for r, mean in enumerate(means)) / plan.replicas
    assert weighted == Fraction(sum(losses.values()), plan.total)


@given(plans())
def test_a_replica_runs_its_own_first_and_in_order(plan):
    for replica in range(plan.replicas):
        share = plan.share(replica)
        own = min(plan.counts[replica], plan.microbatches)
        assert share[:own] == tuple((replica, j) for j in range(own))
        others = share[own:]
        assert all(home != replica for home, _ in others)
        assert list(others) == sorted(others, key=lambda pair: pair[::-1])


@given(st.integers(1, 9), st.integers(1, 20))
def test_full_is_what_stock_runs(replicas, microbatches):
    plan = SyncPlan.full_of(replicas, microbatches)
    assert plan.full
    for replica in range(replicas):
        assert plan.share(replica) == tuple((replica, j) for j in range(microbatches))
        assert plan.weight(replica) == 1


@given(plans())
def test_only_equal_counts_are_full(plan):
    assert plan.full == (set(plan.counts) == {plan.microbatches})


def test_three_replicas_run_what_a_slow_one_does_not():
    plan = SyncPlan(8, (9, 9, 9, 5))
    own = tuple((2, j) for j in range(8))
    assert [plan.share(r)[-1] for r in range(3)] == [(3, 5), (3, 6), (3, 7)]
    assert plan.share(2) == (*own, (3, 7))
    assert plan.share(3) == tuple((3, j) for j in range(5))
    assert [plan.weight(r) for r in (0, 3)] == [Fraction(9, 8), Fraction(5, 8)]
    assert (plan.replicas, plan.total, plan.full) == (4, 32, False)


def test_what_two_homes_give_stands_by_number_then_home():
    plan = SyncPlan(4, (6, 2, 6, 2))
    assert plan.share(0)[4:] == ((1, 2), (3, 2))
    assert plan.share(2)[4:] == ((1, 3), (3, 3))


# --- the checker ---------------------------------------------------------------------------------


@given(plans(2, 6, 8), st.data())
def test_a_wrong_plan_is_found(plan, data):
    """A sample twice, lost, in the wrong replica; a weight that is off by one microbatch."""
    each = plan.microbatches
    shares, weights = parts(plan)
    check_sync(each, plan.counts, shares, weights)
    r = data.draw(st.integers(0, plan.replicas - 1))
    place = data.draw(st.integers(0, plan.counts[r] - 1))
    other = data.draw(st.sampled_from([p for s in shares for p in s if p != shares[r][place]]))

    def wrong(shares=shares, weights=weights):
        return refused(check_sync, each, plan.counts, shares, weights)

    twice = [list(share) for share in shares]
    twice[r][place] = other
    assert "its samples would count twice" in wrong(twice)
    lost = [list(share) for share in shares]
    del lost[r][place]
    assert f"share of replica {r}" in wrong(lost)
    strange = [list(share) for share in shares]
    strange[r][place] = data.draw(st.sampled_from([(0, each), (plan.replicas, 0), (-1, 0)]))
    assert "homes are 0 to" in wrong(strange)
    off = list(weights)
    off[r] += data.draw(st.sampled_from([-1, 1])) * Fraction(1, each)
    assert f"weight of replica {r}" in wrong(weights=off)
    assert "one per replica" in wrong(shares[:-1])
    assert "one per replica" in wrong(weights=weights[:-1])


def test_weights_that_sum_to_one_may_still_be_wrong():
    plan = SyncPlan(8, (9, 9, 9, 5))
    shares, weights = parts(plan)
    assert "weight of replica 0" in refused(
        check_sync, 8, plan.counts, shares, [weights[3], *weights[1:3], weights[0]]
    )


@pytest.mark.parametrize(
    ("microbatches", "counts", "words"),
    [
        (8, (9, 9, 9, 6), "they add up to 33, and the global batch has 32 microbatches, 4 x 8"),
        (8, (9, 9, 9, 4), "they add up to 31"),
        (8, (8, 16, 0), "count of replica 2 0: a whole number of at least 1"),
        (8, (12, 13, -1), "count of replica 2 -1: a whole number of at least 1"),
        (8, (), "at least 1 replica"),
        (0, (0,), "microbatches per replica 0"),
        (8, (8.0,), "count of replica 0 8.0"),
        (1, (True,), "count of replica 0 True"),
        (True, (1,), "microbatches per replica True"),
        ("8", (8,), "microbatches per replica '8'"),
        (MOST_PAIRS + 1, (MOST_PAIRS + 1,), f"at most {MOST_PAIRS}"),
    ],
)
def test_counts_that_are_no_plan_are_refused(microbatches, counts, words):
    assert words in refused(SyncPlan, microbatches, counts)


# --- text ----------------------------------------------------------------------------------------


@given(plans())
def test_a_plan_reads_back(plan):
    again = parse_sync(plan.text())
    assert (again, again.digest()) == (plan, plan.digest())
    assert parse_sync(plan.text()[:-1]) == plan


@given(plans(), plans())
def test_digests_differ_where_plans_do(a, b):
    assert (a.digest() == b.digest()) == (a == b)


def test_a_plan_in_words():
    assert SyncPlan(8, (9, 9, 9, 5)).text() == "sync 8: 9 9 9 5\n"


@pytest.mark.parametrize(
    "text",
    ["", "sync", "sync 8:", "sync 8: ", "sync 8:8", "sync 8: 9,7", "sync 08: 8", "sync 8: 08",
     "sync 8: 8 ", " sync 8: 8", "sync 8: 8\n\n", "sync 8: 8\nsync 8: 8", "sync 8: ٨", "sync 0: 0",
     "sync 8: 8.0", "sync 8: 17 -1", "sync 1: " + "9" * 5000, "full"],
)  # fmt: skip
def test_what_is_no_text_of_a_plan_is_refused(text):
    assert refused(parse_sync, text).startswith("shares of microbatches ")


def test_a_text_with_other_counts_is_refused():
    assert "they add up to 17" in refused(parse_sync, "sync 8: 9 8")
