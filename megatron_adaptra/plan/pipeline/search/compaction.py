"""Improvements of a found order at no cost in time: less memory, and backwards in one piece."""

from __future__ import annotations

from dataclasses import replace

from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.schedule import Line, Schedule
from megatron_adaptra.plan.pipeline.search.dispatch import dispatch
from megatron_adaptra.plan.pipeline.search.job_shop import BACKWARD, WEIGHT, JobShop, Order
from megatron_adaptra.plan.pipeline.search.rule_search import RuleResult
from megatron_adaptra.plan.pipeline.search.search_budget import late


def least_memory(shop: JobShop, best: RuleResult, end: float) -> Order:
    """Dispatch the rules of `best` under the least budget that costs no time, found by `end`."""
    order, conditions = best.order, shop.conditions
    low, high = 0, int(max(shop.peaks(best.order)) + 0.999)
    while high - low > 1 and not late(end):
        middle = (low + high) // 2
        budget = tuple(min(b, float(middle)) for b in conditions.activation_budget)
        lean = JobShop(replace(conditions, activation_budget=budget))
        limit = best.seconds * (1 + 1e-12)
        tried = dispatch(lean, best.rules, conditions.recompute, limit, end)
        timing = shop.time(tried) if tried is not None else None
        if tried is not None and timing is not None and timing.makespan <= limit:
            order, high = tried, middle
        else:
            low = middle
    return order


def merge_backwards(shop: JobShop, schedule: Schedule) -> Schedule:
    """Merge the halves of a backward where the second follows at once and no op waits longer.

    Splitting is not free in practice (two kernel launches, inputs kept for longer). A backward is
    merged where its gradient still arrives before it is used, so that no time of `shop` changes.
    """
    order = shop.order_of(schedule)
    timing = shop.time(order)
    if timing is None:
        return schedule
    count, end, seconds = shop.count, timing.end, shop.seconds

    def merged(row: list[int], line: Line) -> Line:
        out: list[Op] = []
        previous = -1
        for number, op in zip(row, line, strict=True):
            twins = op.kind is Kind.W and number - previous == count * (WEIGHT - BACKWARD)
            if twins and unhurried(previous, number):
                out[-1] = op._replace(kind=Kind.B)
            else:
                out.append(op)
            previous = number
        return tuple(out)

    def unhurried(half: int, rest: int) -> bool:
        user = shop.consumer[half]
        if user < 0:
            return True
        if (shop.stage_of(half), shop.stage_of(user)) in shop.wires:
            return False  # on a narrow link it would hold up the messages behind it
        return end[rest] + shop.lag[user] <= end[user] - seconds[user]

    rows = zip(order, shop.lines(order), strict=True)
    return replace(schedule, order=tuple(merged(row, line) for row, line in rows))
