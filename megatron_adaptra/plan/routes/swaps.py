"""Plans in which whole pipelines exchange partners: each worker runs one home, in one order.

Only a worker's partners and the depth of its warmup differ from those of a replica by itself. So
Megatron's own schedule function can run such plans, and backwards keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from megatron_adaptra.base.units import ten_digits
from megatron_adaptra.ir.conditions import OP_COSTS, Conditions, LinkState
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Line, Schedule
from megatron_adaptra.plan.pipeline.base import Plan
from megatron_adaptra.plan.routes.chains import Chains, own_chains, swapped_chains
from megatron_adaptra.plan.routes.words import loads_in_words

SWAPPED, ALONE = "swap", "warmup"  # policies


def chain_schedules(
    conditions: ReplicaConditions,
    start: Schedule,
    timed: Callable[[Schedule, Conditions], Plan],
    deeper: Callable[[Conditions], Plan],
) -> Iterator[Schedule]:
    """Yield the schedules that whole pipelines can run, the cheapest first.

    Each replica by itself with deeper warmups where these help; then exchanged partners with the
    warmups of the start; then both.

    Args:
        conditions: of all workers, of which none is dead.
        start: of one pipeline, with its warmup depths.
        timed: evaluates a schedule of one pipeline.
        deeper: makes the plan of one pipeline.
    """
    plans: dict[object, tuple[Plan, Plan]] = {}

    def both(chain: Sequence[int]) -> tuple[Plan, Plan]:
        one = conditions.chain(chain)
        key = one.forward, tuple(one.links.items()), one.activation_budget, one.core_share
        if key not in plans:  # most chains are alike
            plans[key] = timed(start, one), deeper(one)
        return plans[key]

    own, others = own_chains(conditions), list(swapped_chains(conditions))
    yield _deeper(own, both)
    for chains in others:
        yield _on_chains([start] * len(chains), chains)
    for chains in others:
        yield _deeper(chains, both)


def alike(conditions: ReplicaConditions, deeper: Callable[[Conditions], Plan]) -> Schedule:
    """Return one pipeline's plan for every replica, made for the worst of each stage and link.

    `conditions`, `deeper`: see `chain_schedules`.
    """
    chains = own_chains(conditions)
    each = [conditions.chain(chain) for chain in chains]

    def worst(name: str) -> tuple[float, ...]:
        return tuple(map(max, zip(*(getattr(one, name) for one in each), strict=True)))

    links = {}
    for path in each[0].links:
        states = [one.links[path] for one in each]
        slowest = min(state.bandwidth for state in states)
        links[path] = LinkState(max(state.delay for state in states), slowest)
    budgets = zip(*(one.activation_budget for one in each), strict=True)
    costs: dict[str, Any] = {name: worst(name) for name in (*OP_COSTS, "core_share")}
    budget = tuple(map(min, budgets))
    one = replace(each[0], links=links, activation_budget=budget, **costs)
    return _on_chains([deeper(one).schedule] * len(chains), chains)


def _deeper(chains: Chains, both: Callable[[Sequence[int]], tuple[Plan, Plan]]) -> Schedule:
    """Deepen the warmups of those chains alone that would be the slowest without."""
    pairs = [both(chain) for chain in chains]
    least = max(ten_digits(min(first.predicted, plan.predicted)) for first, plan in pairs)
    fits = (ten_digits(first.predicted) <= least for first, _ in pairs)
    chosen = [
        first.schedule if enough else plan.schedule
        for (first, plan), enough in zip(pairs, fits, strict=True)
    ]
    return _on_chains(chosen, chains)


def _on_chains(schedules: Sequence[Schedule], chains: Chains) -> Schedule:
    """Combine one pipeline's schedule per chain into a schedule of all replicas."""
    count = len(schedules[0].order)
    lines: list[Line] = [()] * (count * len(chains))
    for home, (chain, schedule) in enumerate(zip(chains, schedules, strict=True)):
        for worker, line in zip(chain, schedule.order, strict=True):
            lines[worker] = _of_home(line, home)
    made = Schedule(tuple(lines), schedules[0].microbatches, replicas=len(chains))
    if words := loads_in_words(made):
        return replace(made, policy=SWAPPED, why=words)
    return replace(made, policy=ALONE, why="every microbatch runs at home")


def _of_home(line: Line, home: int) -> Line:
    return tuple(op._replace(home=home) for op in line)
