"""`adaptive`: every lever the job allows, within its budget, judged by the simulator.

List scheduling by tuned rules gives orders, local search on the longest path improves the best of
them, and the schedules that others would run compete: the plan is never slower than these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from megatron_adaptra.errors import BadInput
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.ir.timeline import peak_in_flight
from megatron_adaptra.model.bounds import lower_bound
from megatron_adaptra.plan.base import PLANNERS, planner, slow_links
from megatron_adaptra.plan.baselines import one_by_one
from megatron_adaptra.plan.compaction import lighter, whole_backwards
from megatron_adaptra.plan.job_shop import ROOM, Order, Shop, exact_times
from megatron_adaptra.plan.robust import candidates, steadiest
from megatron_adaptra.plan.rule_search import Tuner, shorter
from megatron_adaptra.plan.search_budget import Effort
from megatron_adaptra.plan.tabu_search import Local
from megatron_adaptra.sim.clock import simulate

RIVALS = ("1f1b", "zb-h1", "zb-h2", "interleaved")
TUNED, RETUNED, WHOLE = (
    0.4,
    0.8,
    0.45,
)  # shares of the effort: tuned small, then in full; tuned in full at once
PLAIN = 0.2  # share of a time limit that is searched without recompute, where that is allowed
LEADERS, SHARE = 3, 0.1  # orders that local search starts from, and what each gets of the effort


@planner("adaptive")
def adaptive(conditions: Conditions, sends: str, time_limit: float | None) -> Schedule:
    """The fastest order of F, I, W and R within the budget that the search finds."""
    if any(link.jitter > 0 for link in conditions.links.values()):
        options = candidates(conditions)
        limit = limited(time_limit, 1 / len(options))
        best = steadiest([plan(option, sends, limit) for option in options], conditions, sends)
    else:
        best = plan(conditions, sends, time_limit)
    return replace(best, policy="adaptive", why=explain(best, conditions))


def plan(conditions: Conditions, sends: str, time_limit: float | None) -> Schedule:
    """The best schedule that the search or a rival has; of equals the one that holds least."""
    shop = Shop(conditions)
    plain = exact_times(conditions, sends)
    found = [Schedule(shop.lines(o), shop.count, shop.chunks) for o in orders(shop, time_limit)]
    if conditions.split and not plain:
        found = [_merged(shop, schedule) for schedule in found] + found
    found += rivals(conditions, sends, RIVALS if plain else (*RIVALS, "warmup"))
    found = found or [one_by_one(conditions)]
    if not plain:
        return min(found, key=lambda schedule: _rank(_simulated(schedule, conditions, sends)))
    timings = [shop.time(shop.order_of(schedule)) for schedule in found]
    best = min(
        range(len(found)),
        key=lambda i: _rank(math.inf if (timing := timings[i]) is None else timing.makespan),
    )
    timing, order = timings[best], shop.order_of(found[best])
    if not conditions.split or timing is None:
        return found[best]
    halves = replace(found[best], order=shop.lines(order))
    return whole_backwards(shop, halves, order, timing)


def _merged(shop: Shop, schedule: Schedule) -> Schedule:
    """Backwards in one piece where on devices of their own nobody would wait for them."""
    order = shop.order_of(schedule)
    timing = shop.time(order)
    return schedule if timing is None else whole_backwards(shop, schedule, order, timing)


def orders(shop: Shop, time_limit: float | None) -> Iterator[Order]:
    """Without recompute; then, where it is allowed and something is left to gain, with it."""
    ops, c = 3 * shop.count * shop.positions, shop.conditions
    share = 1.0
    if c.recompute:
        share = PLAIN
        whole = search(Shop(replace(c, recompute=False)), Effort(ops, limited(time_limit, share)))
        if whole is not None:
            yield whole
            timing = shop.time(whole)
            if timing is not None and timing.makespan <= _bound(shop) * (1 + 1e-9):
                return
        share = 1.0 - PLAIN
    order = search(shop, Effort(ops, limited(time_limit, share), c.recompute))
    if order is not None:
        yield order


def limited(time_limit: float | None, share: float) -> float | None:
    return None if time_limit is None else share * time_limit


def search(shop: Shop, effort: Effort) -> Order | None:
    """Tune rules, on fewer microbatches where there are many; then improve the best orders."""
    bound = _bound(shop)
    tuner = Tuner(shop, effort, bound)
    small = shorter(shop)
    if small is not None:
        first = Tuner(small, effort, _bound(small))
        first.run(TUNED)
        tuner.adopt(first)
        tuner.run(RETUNED)
    else:
        tuner.run(WHOLE)
    best = tuner.best
    if best is None:
        return None
    if not tuner.done:
        started = [
            Local(shop, one.order, shop.conditions.recompute) for one in tuner.leaders(LEADERS)
        ]
        for local in started:
            local.improve(effort, bound, effort.spent + SHARE)
        local = min(started, key=lambda local: local.seconds)
        local.improve(effort, bound)
        if local.seconds < best.seconds * (1 - 1e-9):
            return local.best
    return lighter(shop, best)


def _bound(shop: Shop) -> float:
    return lower_bound(shop.conditions) - shop.conditions.step_seconds


def rivals(conditions: Conditions, sends: str, names: tuple[str, ...]) -> Iterator[Schedule]:
    """What other policies would run, as far as it fits."""
    for name in names:
        try:
            schedule = PLANNERS[name](conditions, sends, None)
        except BadInput:
            continue
        peaks = (peak_in_flight(line, schedule.chunks) for line in schedule.order)
        budgets = zip(peaks, conditions.activation_budget, strict=True)
        if all(peak <= budget + ROOM for peak, budget in budgets):
            yield schedule


def _simulated(schedule: Schedule, conditions: Conditions, sends: str) -> float:
    return simulate(lower(schedule), conditions, sends).makespan


def _rank(seconds: float) -> float:
    """Ten digits: what differs in the last bits is equal, and then the first of all is taken."""
    return float(f"{seconds:.9e}")


def explain(schedule: Schedule, conditions: Conditions) -> str:
    """The plan in one sentence."""
    ops = [op.kind for line in schedule.order for op in line]
    what = ["warmup " + ",".join(map(str, schedule.warmup))]
    split, whole = ops.count(Kind.I), ops.count(Kind.B)
    if split:
        what.append(f"{split} of {split + whole} backwards in halves")
    if Kind.R in ops:
        what.append(f"{ops.count(Kind.R)} of {ops.count(Kind.F)} forwards recomputed")
    return slow_links(conditions) + ", ".join(what)
