"""The parts of the adaptive planner: the job shop, the list scheduler, local search, the finish."""

import json
import math
import random
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir.strategies import random_conditions, random_schedule, seeds
from jobs import jobs
from small_cases import OPTIMA, small_case

from benchmarks.common import both_ways
from megatron_adaptra.ir.check import check
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Schedule, peak_in_flight
from megatron_adaptra.plan import make_plan
from megatron_adaptra.plan.pipeline.fixed import one_by_one
from megatron_adaptra.plan.pipeline.search.compaction import least_memory, merge_backwards
from megatron_adaptra.plan.pipeline.search.dispatch import SAME, Rule, dispatch
from megatron_adaptra.plan.pipeline.search.job_shop import JobShop, Order
from megatron_adaptra.plan.pipeline.search.rule_search import RuleResult, RuleSearch
from megatron_adaptra.plan.pipeline.search.search_budget import SearchBudget
from megatron_adaptra.plan.pipeline.search.tabu_search import TabuSearch
from megatron_adaptra.sim.clock import simulate

shares = st.sampled_from([0.0, 0.3, 0.7, 1.0])
depths = st.sampled_from([math.inf, 1.0, 2.0, 3.5])
rules = st.builds(
    Rule, shares, shares, shares, *[st.booleans()] * 3, depth_first=st.just(True), in_flight=depths,
    recompute_early=st.booleans(), recomputed_in_warmup=st.booleans(),
)  # fmt: skip
alone = jobs(cores=False)  # the shop gives every stage a device of its own


def schedule_of(shop: JobShop, order: Order) -> Schedule:
    return Schedule(shop.lines(order), shop.count, shop.chunks)


def some_schedule(seed: int, c: Conditions) -> Schedule:
    """Any order at all, with the levers of the job; its budget is not looked at."""
    rng = random.Random(seed)
    again = rng.random() if c.recompute else 0.0
    return random_schedule(rng, c.stages, c.microbatches, c.chunks, float(c.split), again)


def by_rules(c: Conditions, row: list[Rule]) -> tuple[JobShop, Order | None]:
    shop = JobShop(c)
    return shop, dispatch(shop, row[: c.stages], c.recompute)


def makespan(shop: JobShop, order: Order) -> float:
    timing = shop.time(order)
    assert timing is not None
    return timing.makespan


def assert_valid(shop: JobShop, order: Order) -> None:
    """It runs within its budget and takes each kind of op in microbatch order."""
    schedule, count = schedule_of(shop, order), range(shop.count)
    check(lower(schedule), shop.conditions.activation_budget)
    for line in schedule.order:
        for chunk in range(shop.chunks):
            for one in ("F", "BI", "BW"):
                mine = [op for op in line if op.chunk == chunk and op.kind.value in one]
                assert [op.microbatch for op in mine] == list(count), one


# --- the shop ------------------------------------------------------------------------------------


@given(seeds, alone)
def test_the_shop_times_any_order_as_the_simulator_does(seed, c):
    schedule, shop = some_schedule(seed, c), JobShop(c)
    order = shop.order_of(schedule)
    timing = shop.time(order)
    spans = simulate(lower(schedule), replace(c, step_seconds=0.0)).spans
    ends = {(span.stage, span.op): span.end for span in spans}
    for stage, (line, row) in enumerate(zip(schedule.order, order, strict=True)):
        for op, number in zip(line, row, strict=True):
            assert timing.end[number] == pytest.approx(ends[stage, op], rel=1e-9)
    assert timing.makespan == pytest.approx(max(ends.values()), rel=1e-9)
    assert sorted(timing.sequence) == sorted(number for row in order for number in row)


@given(seeds, alone)
def test_numbers_and_ops_are_the_same_order(seed, c):
    schedule, shop = some_schedule(seed, c), JobShop(c)
    order = shop.order_of(schedule)
    assert shop.lines(order) == schedule.order
    assert shop.peaks(order) == pytest.approx(
        [peak_in_flight(line, c.chunks) for line in schedule.order]
    )


def test_the_shop_does_not_time_what_hangs():
    c = Conditions(2, (1.0,) * 2, (1.0,) * 2, (1.0,) * 2)
    order = JobShop(c).order_of(one_by_one(c))
    assert JobShop(c).time(order) is not None
    assert JobShop(c).time([order[0], order[1][3:] + order[1][:3]]) is None  # the other one first


def test_a_whole_backward_stands_for_its_halves():
    c = random_conditions(random.Random(0), 3, 5)
    whole = random_schedule(random.Random(1), 3, 5)
    shop = JobShop(c)
    halves = schedule_of(shop, shop.order_of(whole))
    assert {op.kind.value for line in halves.order for op in line} == {"F", "I", "W"}
    assert makespan(shop, shop.order_of(whole)) <= simulate(lower(whole), c).makespan * (1 + 1e-9)


# --- the list scheduler --------------------------------------------------------------------------


@settings(max_examples=200)
@given(alone, st.lists(rules, min_size=4, max_size=4))
def test_any_rules_keep_to_the_budget(c, row):
    shop, order = by_rules(c, row)
    if order is None:
        assert c.chunks > 1 or c.recompute  # else no rule of these runs into a dead end
    else:
        assert_valid(shop, order)
        kinds = {op.kind.value for line in shop.lines(order) for op in line}
        assert c.recompute or "R" not in kinds


@given(alone)
def test_the_plain_rule_finds_an_order_for_any_job(c):
    c = c if c.chunks == 1 else replace(c, recompute=False)
    _, order = by_rules(c, [Rule()] * 4)
    assert order is not None


@given(alone, st.lists(rules, min_size=4, max_size=4), st.floats(0.5, 2))
def test_a_limit_cuts_off_what_is_beyond_it(c, row, share):
    shop, order = by_rules(c, row)
    if order is not None:
        limit = makespan(shop, order) * share
        cut = dispatch(shop, row[: c.stages], c.recompute, limit)
        assert cut == order or cut is None
        assert cut is None or makespan(shop, cut) <= limit * (1 + 1e-9) + 100 * SAME


@given(alone)
def test_a_limit_cuts_off_nothing_within_it_where_a_rule_holds_nothing_back(c):
    # A recomputation is put off until there is room, which the order's own makespan is not.
    shop, order = by_rules(replace(c, recompute=False), [Rule()] * 4)
    if order is not None:
        limit = makespan(shop, order) * (1 + 1e-9)
        assert dispatch(shop, [Rule()] * c.stages, False, limit) == order


def test_dispatch_runs_1f1b_where_that_is_best():
    """Whole backwards on healthy links, in the memory of 1F1B."""
    c = Conditions(9, (1.0,) * 4, (1.0,) * 4, (1.0,) * 4, split=False)
    c = replace(c, activation_budget=(4.0, 3.0, 2.0, 1.0))
    shop, order = by_rules(c, [Rule()] * 4)
    assert makespan(shop, order) == (9 + 4 - 1) * 3
    assert schedule_of(shop, order).warmup == (4, 3, 2, 1)


def test_recompute_lets_more_forwards_hide_a_slow_link():
    c = Conditions(12, (1.0,) * 3, (1.0,) * 3, (1.0,) * 3, both_ways({1: 8.0}))
    c = replace(c, activation_budget=(3.0,) * 3)
    row = [Rule(reserve=0.3)] * 3  # room for the inputs of six
    without, recomputed = (by_rules(replace(c, recompute=yes), row) for yes in (False, True))
    assert_valid(*recomputed)
    assert makespan(*recomputed) < 0.9 * makespan(*without)


# --- local search --------------------------------------------------------------------------------


@settings(max_examples=80)
@given(alone, st.lists(rules, min_size=4, max_size=4), seeds)
def test_local_search_keeps_an_order_valid_and_never_makes_it_worse(c, row, seed):
    shop, order = by_rules(c, row)
    order = order or shop.order_of(one_by_one(c))
    before = [list(line) for line in order]
    local = TabuSearch(shop, order, seed)
    local.improve(SearchBudget(shop.count), 0.0, until=0.02)
    assert order == before
    assert_valid(shop, local.best)
    assert local.seconds <= makespan(shop, order)
    assert local.seconds == pytest.approx(makespan(shop, local.best), rel=1e-9)


def test_local_search_alone_comes_close_to_the_optimum():
    """From the slowest order there is, one microbatch after another."""
    optima, gaps = json.loads(OPTIMA.read_text()), []
    for seed in range(24):
        c = replace(small_case(seed), recompute=False)
        if small_case(seed) == c:
            shop = JobShop(c)
            local = TabuSearch(shop, shop.order_of(one_by_one(c)))
            local.improve(SearchBudget(shop.count), optima[str(seed)]["seconds"])
            gaps.append(local.seconds / optima[str(seed)]["seconds"] - 1)
    assert len(gaps) > 12
    assert fmean(gaps) <= 0.02


# --- the finish ----------------------------------------------------------------------------------


def tuned_for(shop: JobShop) -> RuleResult | None:
    tuner = RuleSearch(shop, SearchBudget(shop.count), 0.0)
    tuner.run(0.05)
    return tuner.best


@settings(max_examples=40)
@given(alone)
def test_lighter_is_no_slower_and_holds_no_more(c):
    shop = JobShop(c)
    tuned = tuned_for(shop)
    if tuned is not None:
        order = least_memory(shop, tuned, math.inf)
        assert_valid(shop, order)
        assert makespan(shop, order) <= tuned.seconds * (1 + 1e-9)
        assert max(shop.peaks(order)) <= max(shop.peaks(tuned.order)) + 1e-9


def test_lighter_gives_back_what_is_of_no_use():
    c = Conditions(24, (1.0,) * 4, (1.0,) * 4, (1.0,) * 4)
    shop = JobShop(c)
    tuned = tuned_for(shop)
    assert max(shop.peaks(tuned.order)) > 12
    assert max(shop.peaks(least_memory(shop, tuned, math.inf))) <= 8


def finished(c: Conditions, order: Order) -> Schedule:
    shop = JobShop(c)
    return merge_backwards(shop, schedule_of(shop, order))


@settings(max_examples=150)
@given(seeds, alone)
def test_whole_backwards_change_no_time(seed, c):
    c = replace(c, split=True, backward=())
    halves, shop = some_schedule(seed, c), JobShop(c)
    whole = finished(c, shop.order_of(halves))
    assert shop.order_of(whole) == shop.order_of(halves)
    before, after = simulate(lower(halves), c), simulate(lower(whole), c)
    assert after.makespan == pytest.approx(before.makespan, rel=1e-9)


def test_backwards_are_whole_where_nobody_waits():
    """On the first stage, that is; a stage before another one's critical path keeps its halves."""
    c = Conditions(6, (1.0,) * 3, (1.0,) * 3, (1.0,) * 3)
    stock = make_plan(c, "1f1b").schedule
    whole = finished(c, JobShop(c).order_of(stock))
    assert whole.order[0] == stock.order[0]
    assert {op.kind.value for op in whole.order[2]} == {"F", "I", "W"}
