"""The policy `adaptive`: every lever the job allows, within its budget, judged by simulation.

List scheduling by tuned rules gives orders, tabu search on the longest path improves the best of
them, and the schedules that others would run compete: the plan is never slower than these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.base.units import brief, ten_digits
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.model.bounds import lower_bound
from megatron_adaptra.plan.link_words import slow_links
from megatron_adaptra.plan.pipeline.base import PLANNERS, planner
from megatron_adaptra.plan.pipeline.fixed import one_by_one
from megatron_adaptra.plan.pipeline.robust import candidates, least_mean
from megatron_adaptra.plan.pipeline.search.compaction import least_memory, merge_backwards
from megatron_adaptra.plan.pipeline.search.job_shop import ROOM, JobShop, Order, exact_times
from megatron_adaptra.plan.pipeline.search.rule_search import RuleSearch, shorter
from megatron_adaptra.plan.pipeline.search.search_budget import SearchBudget, end_of, late, left
from megatron_adaptra.plan.pipeline.search.tabu_search import TabuSearch
from megatron_adaptra.sim.clock import simulate

RIVALS = ("1f1b", "zb-h1", "zb-h2", "interleaved")
# Shares of the budget by which the rules are tuned: on fewer microbatches, then on all; or at once.
SMALL_TUNED, THEN_TUNED, TUNED = 0.4, 0.8, 0.45
PLAIN = 0.2  # share of a time limit that is searched without recompute, where that is allowed
SEARCHED = 0.5  # of a time limit, where something comes after it: draws, or a search for depths
LEADERS, SHARE = 3, 0.1  # orders that tabu search starts from, and what each gets of the budget


@planner("adaptive")
def adaptive(conditions: Conditions, sends: str, time_limit: float | None) -> Schedule:
    """Find the fastest order of F, I, W and R within the budget.

    `sends`: "eager" or "rendezvous"; `time_limit`: seconds, or None to count ops.
    """
    if any(link.jitter > 0 for link in conditions.links.values()):
        end, options = end_of(time_limit), candidates(conditions)
        options = options[:1] if time_limit == 0 else options
        limit = limited(time_limit, SEARCHED / len(options))
        best = least_mean(
            [plan(option, sends, limit) for option in options], conditions, sends, end
        )
    else:
        best = plan(conditions, sends, time_limit)
    return replace(best, policy="adaptive", why=explain(best, conditions))


def plan(conditions: Conditions, sends: str, time_limit: float | None) -> Schedule:
    """Find the best schedule of the search and of its rivals; of equals the one that holds least.

    `sends` and `time_limit` as for `adaptive`; no link has jitter.
    """
    end = end_of(time_limit)
    shop = JobShop(conditions)
    plain = exact_times(conditions, sends)
    searched = limited(time_limit, 1.0 if plain else SEARCHED)
    found = [Schedule(shop.lines(o), shop.count, shop.chunks) for o in orders(shop, searched)]
    if conditions.split and not plain:
        found = [merge_backwards(shop, schedule) for schedule in found] + found
    found += rivals(conditions, sends, RIVALS if plain else (*RIVALS, "warmup"), end)
    found = found or [one_by_one(conditions)]
    if not plain:
        return min(found, key=lambda schedule: ten_digits(_simulated(schedule, conditions, sends)))
    timings = [shop.time(shop.order_of(schedule)) for schedule in found]
    best = min(
        range(len(found)),
        key=lambda i: ten_digits(math.inf if (timing := timings[i]) is None else timing.makespan),
    )
    return merge_backwards(shop, found[best]) if conditions.split else found[best]


def orders(shop: JobShop, time_limit: float | None) -> Iterator[Order]:
    """Yield an order without recompute; then, where it is allowed and may gain, one with it.

    `time_limit`: seconds for both, or None.
    """
    ops, c, end = 3 * shop.count * shop.positions, shop.conditions, end_of(time_limit)
    if c.recompute:
        whole = search(
            JobShop(replace(c, recompute=False)), SearchBudget(ops, limited(time_limit, PLAIN))
        )
        if whole is not None:
            yield whole
            timing = shop.time(whole)
            if timing is not None and timing.makespan <= _bound(shop) * (1 + 1e-9):
                return
    order = search(shop, SearchBudget(ops, left(end), c.recompute))
    if order is not None:
        yield order


def limited(time_limit: float | None, share: float) -> float | None:
    """Return that `share` of a `time_limit`; None where there is no limit."""
    return None if time_limit is None else share * time_limit


def search(shop: JobShop, budget: SearchBudget) -> Order | None:
    """Tune rules, on fewer microbatches where there are many; then improve the best orders."""
    bound = _bound(shop)
    rules = RuleSearch(shop, budget, bound)
    small = shorter(shop)
    if small is not None:
        first = RuleSearch(small, budget, _bound(small))
        first.run(SMALL_TUNED)
        rules.adopt(first)
        rules.run(THEN_TUNED)
    else:
        rules.run(TUNED)
    best = rules.best
    if best is None:
        return None
    if not rules.done and not late(budget.end):
        started = [TabuSearch(shop, one.order) for one in rules.leaders(LEADERS)]
        for tabu in started:
            tabu.improve(budget, bound, budget.spent + SHARE)
        tabu = min(started, key=lambda one: one.seconds)
        tabu.improve(budget, bound)
        if tabu.seconds < best.seconds * (1 - 1e-9):
            return tabu.best
    return least_memory(shop, best, budget.end)


def _bound(shop: JobShop) -> float:
    return lower_bound(shop.conditions) - shop.conditions.step_seconds


def rivals(
    conditions: Conditions, sends: str, names: tuple[str, ...], end: float
) -> Iterator[Schedule]:
    """Yield the schedules of the policies `names` under such `sends`, where memory is enough.

    `end`: the moment at which their searches end, on the monotonic clock.
    """
    for name in names:
        try:
            schedule = PLANNERS[name](conditions, sends, left(end))
        except BadInput:
            continue
        budgets = zip(schedule.peak_in_flight(), conditions.activation_budget, strict=True)
        if all(peak <= budget + ROOM for peak, budget in budgets):
            yield schedule


def _simulated(schedule: Schedule, conditions: Conditions, sends: str) -> float:
    return simulate(lower(schedule), conditions, sends).makespan


def explain(schedule: Schedule, conditions: Conditions) -> str:
    """Describe the plan in one sentence."""
    ops = [op.kind for line in schedule.order for op in line]
    what = [f"warmup {brief(schedule.warmup)}"]
    split, whole = ops.count(Kind.I), ops.count(Kind.B)
    if split:
        what.append(f"{split} of {split + whole} backwards split into input and weight gradients")
    if Kind.R in ops:
        what.append(f"{ops.count(Kind.R)} of {ops.count(Kind.F)} forwards recomputed")
    return slow_links(conditions) + ", ".join(what)
