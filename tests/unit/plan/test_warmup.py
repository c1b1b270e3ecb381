"""The warmup planner: what it returns runs, fits, and is as fast as the best there is."""

import json
import math
import random
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from ir.strategies import conditions, of_depths, random_conditions, seeds

from benchmarks.common import both_ways
from megatron_adaptra.base.errors import BadInput, ScheduleError
from megatron_adaptra.ir.check import SENDS, check
from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Schedule, parse_line
from megatron_adaptra.model.bounds import lower_bound
from megatron_adaptra.plan import PLANNERS, evaluate
from megatron_adaptra.plan import make_plan as plan_with
from megatron_adaptra.plan.link_words import link_in_words, out_of_bandwidth, ports_in_words
from megatron_adaptra.plan.pipeline.depths import DepthSearch, choices, count_choices, spread
from megatron_adaptra.plan.pipeline.fixed import stock_warmup
from megatron_adaptra.sim.clock import simulate
from megatron_adaptra.sim.warmup import WarmupClock

both_sends = st.sampled_from(SENDS)


def make_plan(c: Conditions, policy: str = "warmup", sends: str = "eager"):
    return plan_with(replace(c, split=False), policy, sends)


def seconds_of(depths, c: Conditions, sends: str = "eager") -> float:
    return simulate(lower(of_depths(depths, c.microbatches)), c, sends).makespan


def runs(depths, count: int) -> bool:
    try:
        check(lower(of_depths(depths, count)))
    except ScheduleError:
        return False
    return True


@cache
def all_that_run(stages: int, count: int) -> list[tuple[int, ...]]:
    """All warmup depths that pass `check`. What hangs with two stages hangs with more below it."""
    pairs = {pair for pair in product(range(1, count + 1), repeat=2) if runs(pair, count)}
    every = product(range(1, count + 1), repeat=stages)
    return [d for d in every if pairs.issuperset(pairwise(d)) and runs(d, count)]


def fits(depths, c: Conditions) -> bool:
    return all(depth <= budget for depth, budget in zip(depths, c.activation_budget, strict=True))


def test_what_runs_are_the_depths_that_never_increase():
    """So the planner need look at no others; here all are tried, pairs or not."""
    for stages, count in ((1, 4), (2, 6), (3, 4), (4, 3)):
        every = set(product(range(1, count + 1), repeat=stages))
        assert {d for d in every if runs(d, count)} == set(all_that_run(stages, count))
        assert sorted(choices((count,) * stages)) == all_that_run(stages, count)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_choices_keep_to_the_caps(caps):
    caps = tuple(min(caps[: i + 1]) for i in range(len(caps)))
    listed = list(choices(caps))
    assert len(listed) == len(set(listed)) == count_choices(caps)
    every = product(*(range(1, cap + 1) for cap in caps))
    assert set(listed) == {d for d in every if all(a >= b for a, b in pairwise(d))}


@given(conditions(), both_sends)
def test_every_plan_runs_within_its_budget(c, sends):
    plan = make_plan(c, sends=sends)
    check(plan.program, c.activation_budget)
    assert plan.peak_in_flight == plan.schedule.warmup == plan.timeline.peak_in_flight()
    assert plan.predicted == seconds_of(plan.schedule.warmup, c, sends)
    assert plan.lower_bound <= plan.predicted * (1 + 1e-12)


@given(conditions(), both_sends)
def test_never_slower_than_1f1b(c, sends):
    stock = stock_warmup(c.stages, c.microbatches)
    if not fits(stock, c):
        c = replace(c, activation_budget=())
    plan = make_plan(c, sends=sends)
    assert plan.predicted <= make_plan(c, "1f1b", sends).predicted * (1 + 2e-9)


def assert_best(c: Conditions, sends: str) -> None:
    times = {
        depths: seconds_of(depths, c, sends)
        for depths in all_that_run(c.stages, c.microbatches)
        if fits(depths, c)
    }
    best = min(times.values())
    shallowest = min(sum(d) for d, t in times.items() if t <= best * (1 + 1e-13))
    plan = make_plan(c, sends=sends)
    assert plan.predicted <= best * (1 + 2e-9)
    assert sum(plan.schedule.warmup) <= shallowest


@examples(30)
@given(conditions(most=5).filter(lambda c: c.stages <= 4), both_sends)
def test_the_best_of_all_for_any_small_job(c, sends):
    assert_best(c, sends)


@examples(12)
@given(seeds, st.integers(1, 4), st.integers(1, 8), both_sends, st.none() | st.floats(0.5, 4))
def test_the_best_of_all_for_uneven_jobs(seed, stages, count, sends, cores):
    assert_best(random_conditions(random.Random(seed), stages, count, cores=cores), sends)


# --- the local search ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_the_local_search_finds_what_trying_all_finds(seed):
    rng = random.Random(seed)
    stages, count = rng.choice([(4, 12), (5, 9), (6, 8)])
    budget = rng.choice([(), (rng.randint(2, count),) * stages])
    c = random_conditions(rng, stages, count, activation_budget=budget)
    search = DepthSearch(c, "eager")
    climbed, best = search.rank(search.climb()), search.rank(search.exhaustive())
    assert climbed[:2] == best[:2]


KNOWN = {22: 784, 53: 1002, 471: 705, 565: 1200, 570: 1472, 704: 1937, 1047: 1025}  # seconds


def harsh(rng: random.Random) -> Conditions:
    """Small whole numbers, long delays, tight budgets: plateaus wherever one looks."""
    stages, count = rng.choice([(8, 16), (10, 12), (12, 16)])

    def each(least: int) -> tuple[float, ...]:
        return tuple(float(rng.randint(least, 5)) for _ in range(stages))

    ways = [(a, b) for a in range(stages) for b in (a - 1, a + 1) if 0 <= b < stages]
    links = {way: LinkState(float(rng.randint(0, 30))) for way in ways if rng.random() < 0.6}
    f, i, w = each(1), each(1), each(0)
    budget = (rng.randint(2, count // 2 + 1),) * stages
    return Conditions(count, f, i, w, links, activation_budget=budget)


@pytest.mark.parametrize(("seed", "best"), KNOWN.items())
def test_plateaus(seed, best):
    """The best known, from long annealing; fewer starts or moves miss these by 2 to 28%."""
    c = harsh(random.Random(seed))
    search = DepthSearch(c, "eager")
    assert WarmupClock(c).seconds(search.climb()) <= best


def test_a_large_job_reaches_the_bound():
    c = Conditions(128, (0.009,) * 16, (0.01,) * 16, (0.006,) * 16, both_ways({7: 0.06}))
    plan = make_plan(c)
    assert plan.predicted == pytest.approx(plan.lower_bound, rel=1e-9)
    assert plan.predicted < make_plan(c, "1f1b").predicted
    # A slack of 1 everywhere, and of 1 + 120 ms / 25 ms, rounded up, over the slow link.
    warmup = plan.schedule.warmup
    assert [a - b for a, b in pairwise(warmup)] == [1] * 7 + [6] + [1] * 7


def test_spread():
    assert spread([1, 3, 1], (9, 9, 9, 9), 1.0) == [6, 5, 2, 1]
    assert spread([1, 3, 1], (3.5, 9, 9, 9), 1.0) == [3.5, 3, 1.5, 1]
    assert spread([1, 1, 1], (10, 9, 2, 9), math.inf) == [10, 6, 2, 1]
    assert spread([], (4,), 1.0) == [1]


# --- the rest ------------------------------------------------------------------------------------

SLOW = Conditions(12, (0.009,) * 4, (0.01,) * 4, (0.006,) * 4, both_ways({2: 0.06}))


def test_one_slow_link():
    plan = make_plan(SLOW)
    assert plan.schedule.warmup == (9, 8, 7, 1)
    assert plan.schedule.policy == "warmup"
    assert "2->3 60 ms" in plan.schedule.why
    assert "9,8,7,1 instead of 4,3,2,1" in plan.schedule.why
    assert make_plan(SLOW.healthy()).schedule.warmup == (4, 3, 2, 1)
    assert "deep enough" in make_plan(SLOW.healthy()).schedule.why


def test_the_budget_is_kept_and_narrows_what_follows():
    plan = make_plan(replace(SLOW, activation_budget=(12, 3.9, 12, 12)))
    assert plan.schedule.warmup[1] <= 3
    assert make_plan(replace(SLOW, activation_budget=(1,) * 4)).schedule.warmup == (1, 1, 1, 1)


@given(st.integers(1, 5), st.integers(1, 9), both_sends, st.none() | st.just(1.0))
def test_ops_that_take_no_time(stages, count, sends, cores):
    zero = (0.0,) * stages
    free = Conditions(count, zero, zero, zero, cores=cores)
    plan = make_plan(free, sends=sends)
    check(plan.program, free.activation_budget)
    assert (plan.predicted, plan.schedule.warmup) == (0, (1,) * stages)
    far = replace(free, links=both_ways([1.0] * (stages - 1)))
    assert make_plan(far, sends=sends).predicted <= make_plan(far, "1f1b", sends).predicted


def test_stock_is_what_megatron_runs():
    plan = make_plan(SLOW, "1f1b")
    assert plan.schedule.warmup == (4, 3, 2, 1)
    # More stages than microbatches: no stage warms up with what does not exist.
    few = replace(SLOW, microbatches=2)
    assert make_plan(few, "1f1b").schedule.warmup == (2, 2, 2, 1)
    assert " ".join(map(str, plan.schedule.order[2][:5])) == "F0 F1 B0 F2 B1"


def test_a_split_schedule_has_the_bound_of_split_schedules():
    c = Conditions(1, (1.0, 1.0), (1.0, 1.0), (4.0, 4.0))
    s = Schedule((parse_line(["F0", "I0", "W0"]),) * 2, 1)
    plan = evaluate(s, c)
    assert plan.lower_bound == lower_bound(c) == plan.predicted == 8
    assert lower_bound(replace(c, split=False)) == 12


def test_a_planner_is_never_given_what_it_may_change():
    before = json.dumps(SLOW.to_json())
    for policy in PLANNERS:
        with suppress(BadInput):  # some refuse the job
            make_plan(SLOW, policy)
    assert json.dumps(SLOW.to_json()) == before


def test_bandwidth_counts_as_a_slow_link():
    narrow = replace(SLOW, links={(1, 2): LinkState(0.0, 1e6)}, message_bytes=2e4)
    plan = make_plan(narrow)
    assert plan.predicted < make_plan(narrow, "1f1b").predicted
    assert "1->2 20 ms, 20 for its bytes at 1 MB/s" in plan.schedule.why


def test_a_link_out_of_bandwidth_is_distinguished_from_a_slow_one():
    pace = SLOW.microbatch_seconds
    for share, full in ((0.9, ()), (1.1, ((1, 2),))):
        links = {(1, 2): LinkState(0.0, 1e6 / (share * pace)), (2, 3): LinkState(9 * pace)}
        job = replace(SLOW, links=links, message_bytes=1e6)
        assert job.full_links == full
        assert ("out of bandwidth: 1->2; " in out_of_bandwidth(job)) == bool(full)
    assert not replace(job, links={}).full_links


def test_a_port_is_out_of_bandwidth_by_all_that_goes_through_it():
    pace, links = SLOW.microbatch_seconds, {(1, 2): LinkState(1e-3), (2, 3): LinkState(1e-3)}
    last = SLOW.stages - 1
    for share, stage, full in ((0.4, 2, 0), (0.6, 2, 2), (0.6, last, 0), (1.1, last, 1)):
        rate = 1e6 / (share * pace)
        job = replace(SLOW, links=links, message_bytes=1e6, ports={stage: rate})
        assert len(job.full_links) == full
    link = (last - 1, last)
    assert f"{1e3 * 1.1 * pace:.3g} for its bytes at {rate / 1e6:.3g} " in link_in_words(job, link)
    assert ports_in_words(job, [link]) == (
        f"; stage {last} passes {rate / 1e6:.3g} MB/s over all its links together"
    )
    assert ports_in_words(job, [(0, 1)]) == ""
