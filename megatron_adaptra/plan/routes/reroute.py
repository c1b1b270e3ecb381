"""Plans for several replicas: round slow workers, slow paths and dead workers, the cheapest way.

Workers of one stage hold the same parameters, so any of them can run a microbatch of another
replica (ReCycle, SOSP 2024, does so for dead workers). Three moves, the cheapest first:

- *swap*: replicas exchange partners at a stage boundary; no memory, no extra work;
- *shift*: whole microbatches go to another replica;
- *re-route*: single stages of single microbatches go to a peer.

A dearer move is taken only where it is faster.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

from megatron_adaptra.base.units import ten_digits
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.model.replica_bounds import even_shares, replica_bound
from megatron_adaptra.plan.pipeline.base import Evaluated
from megatron_adaptra.plan.pipeline.search.search_budget import end_of
from megatron_adaptra.plan.routes.chains import Chains, own_chains, swapped_chains
from megatron_adaptra.plan.routes.list_schedule import Runs, Workers
from megatron_adaptra.plan.routes.route_search import Found, RouteSearch, transfers
from megatron_adaptra.plan.routes.shares import (
    home_runs,
    microbatch_seconds,
    rerouted,
    shifted,
)
from megatron_adaptra.plan.routes.words import loads_in_words
from megatron_adaptra.sim.clock import simulate

NONE, SWAP, SHIFT, REROUTE = MOVES = "none", "swap", "shift", "re-route"  # the cheapest first
OPS = 1_000_000  # that a search schedules at most: some 3 s
TIMES = 5_000  # that it schedules each op of a job, at most


class Move(NamedTuple):
    """A move holds the best schedule by exchanges of one kind.

    Args:
        name: "none", "swap", "shift" or "re-route"; a dearer one may use the cheaper ones, too.
        schedule: the best found.
        seconds: of an iteration, predicted.
        moved: microbatches at stages where they run away from home.
        in_flight: per worker, the most microbatches in flight.
    """

    name: str
    schedule: Schedule
    seconds: float
    moved: int
    in_flight: tuple[float, ...]


@dataclass(frozen=True)
class ReplicaPlan(Evaluated[ReplicaConditions]):
    """A replica plan evaluates a schedule of several replicas, and lists all moves tried.

    `schedule`: of the move that was chosen. `moves`: the best of each kind, the cheapest first;
    without "none" where a worker is dead.
    """

    moves: tuple[Move, ...] = ()

    @cached_property
    def lower_bound(self) -> float:
        """The seconds that every schedule needs, whatever its routes."""
        return replica_bound(self.conditions)


def plan_replicas(
    conditions: ReplicaConditions,
    sends: str = "eager",
    time_limit: float | None = None,
    ops: int = OPS,
) -> ReplicaPlan:
    """Find the fastest schedule; of equals, that of the cheapest move.

    The same conditions give the same bytes, unless a time limit cuts the search short. Where
    workers share cores, the search assumes that all are slowed alike: at first not at all, then as
    in the best schedule found. The results are compared by the clock, which is more exact.

    Args:
        conditions: of all workers.
        sends: "eager" or "rendezvous".
        time_limit: seconds that the search may take; None for its own measure, counted in ops.
        ops: how many ops it may schedule; fewer for a small job.
    """
    c = conditions
    passes, stretch = (2 if c.shared else 1), 1.0
    plans: dict[str, ReplicaPlan] = {}
    for _ in range(passes):
        kinds = _kinds_of_backward(alone(c, stretch) if c.shared else c)
        for kind in kinds:
            workers, bound = Workers(kind), replica_bound(kind) - c.pipeline.step_seconds
            parts = passes * len(kinds)
            most = min(ops // parts, TIMES * workers.ops)
            search = RouteSearch(workers, most, end_of(time_limit and time_limit / parts))
            for name, one in _moves(kind, workers, search, bound).items():
                schedule = workers.schedule(one.made, name)
                why = loads_in_words(schedule) or "every microbatch runs at home"
                plan = evaluate_replicas(replace(schedule, why=why), c, sends)
                if name not in plans or plan.predicted < plans[name].predicted:
                    plans[name] = plan
        stretch = stretched(min(plans.values(), key=lambda plan: plan.predicted))
    found = ((name, plans[name]) for name in MOVES if name in plans)
    moves = [
        Move(name, plan.schedule, plan.predicted, _moved(plan.schedule), plan.peak_in_flight)
        for name, plan in found
    ]
    best = min(moves, key=lambda move: ten_digits(move.seconds))
    return replace(plans[best.name], moves=tuple(moves))


def evaluate_replicas(
    schedule: Schedule,
    conditions: ReplicaConditions,
    sends: str = "eager",
    ahead: int | None = None,
) -> ReplicaPlan:
    """Return a plan for a `schedule` that is already there.

    Args:
        schedule: of as many replicas and stages as the conditions.
        conditions: of all workers.
        sends: "eager" or "rendezvous".
        ahead: see `lower`.
    """
    program = lower(schedule, ahead)
    return ReplicaPlan(schedule, program, simulate(program, conditions, sends), conditions)


def alone(conditions: ReplicaConditions, stretch: float) -> ReplicaConditions:
    """Return the same with a device per worker, for a search that knows no shared cores.

    On it what ops compute takes `stretch` times as long, and what they wait for as long as before.
    """
    c, p = conditions, conditions.pipeline
    each = [_longer(p.on_core(stage), stretch) for stage in range(p.stages)]
    slow = {}
    for worker in range(c.workers):
        times = c.slow.get(worker, 1.0) * _longer(c.on_core(worker), stretch)
        if times != each[worker % p.stages]:
            slow[worker] = times / each[worker % p.stages]
    pipeline = replace(p.scaled(each), cores=None, core_share=())
    return replace(c, pipeline=pipeline, slow=slow, core_share={})


def stretched(plan: Evaluated[ReplicaConditions]) -> float:
    """Return how many times as long as on cores of its own what ops compute takes in a `plan`."""
    c = plan.conditions
    took = computed = 0.0
    for span in plan.timeline.spans:
        if span.op.kind.computes:
            seconds = c.seconds(span.op.kind, span.stage)
            waited = seconds * (1 - c.on_core(span.stage))
            took += span.end - span.start - waited
            computed += seconds - waited
    return max(1.0, took / computed) if computed > 0 else 1.0


def _longer(share: float, stretch: float) -> float:
    return 1 + share * (stretch - 1)


def _kinds_of_backward(c: ReplicaConditions) -> list[ReplicaConditions]:
    """Return the conditions; and first, where a whole backward is quicker, without halves."""
    pipeline = c.pipeline
    pairs = zip(pipeline.backward_input, pipeline.backward_weight, strict=True)
    halves = [a + b for a, b in pairs]
    if not pipeline.split or not any(map(operator.lt, pipeline.backward, halves)):
        return [c]
    return [replace(c, pipeline=replace(pipeline, split=False)), c]


def _moves(
    c: ReplicaConditions, workers: Workers, search: RouteSearch, bound: float
) -> dict[str, Found]:
    """Return the best result of each move, by its name."""
    found: dict[str, Found] = {}
    own = own_chains(c)
    for chains in [own, *swapped_chains(c)]:
        if not c.failed:
            name = NONE if chains is own else SWAP
            _keep(found, name, search.best_rule(home_runs(workers, chains)))
        shift = _shift(c, workers, search, chains)
        if shift is not None:
            _keep(found, SHIFT, shift)
        _keep(found, REROUTE, _reroute(c, workers, search, chains))
    best = min(found.values(), key=lambda one: one.rank)
    annealed = search.anneal(best, bound)
    if not c.failed:  # else some have no home
        annealed = search.bring_home(annealed, home_runs(workers, own))
    _keep(found, REROUTE, annealed)
    return {name: search.least_memory(one) for name, one in found.items()}


def _keep(found: dict[str, Found], name: str, one: Found) -> None:
    if name not in found or one.rank < found[name].rank:
        found[name] = one


def _shift(
    c: ReplicaConditions, workers: Workers, search: RouteSearch, chains: Chains
) -> Found | None:
    """Move whole microbatches to other chains; None where no chain is whole, or all are alike."""
    seconds = [max(microbatch_seconds(workers, w) for w in chain) for chain in chains]
    if min(seconds) == math.inf or min(seconds) == max(seconds):
        return None
    shares = even_shares([partial(operator.mul, each) for each in seconds], workers.units)
    best = search.best_rule(shifted(workers, chains, shares))
    kinds = [None if each == math.inf else each for each in seconds]

    def options(_: int, best: Found) -> Iterator[tuple[list[int], Runs]]:
        ends = [max(best.made.ends[w] for w in chain) for chain in chains]
        for changed in transfers(parts[0], kinds, ends):
            yield changed, shifted(workers, chains, changed)

    parts = [shares]
    return _settled(search, best, parts, [0], options)


def _reroute(c: ReplicaConditions, workers: Workers, search: RouteSearch, chains: Chains) -> Found:
    """Move single stages of single microbatches to other workers, so that each has its share."""
    base = home_runs(workers, chains)
    stages = [[chain[s] for chain in chains] for s in range(c.stages)]
    shares = []
    for line in stages:
        costs = [partial(operator.mul, microbatch_seconds(workers, w)) for w in line]
        shares.append(even_shares(costs, workers.units))

    def line_of(stage: int, numbers: list[int]) -> list[int]:
        return rerouted(workers, base, stage, dict(zip(stages[stage], numbers, strict=True)))

    best = search.best_rule([line_of(s, shares[s]) for s in range(c.stages)])
    kinds = [
        [
            None if w in c.failed else (microbatch_seconds(workers, w), workers.budget[w])
            for w in line
        ]
        for line in stages
    ]
    uneven = [s for s in range(c.stages) if len(set(kinds[s])) > 1]

    def options(stage: int, best: Found) -> Iterator[tuple[list[int], Runs]]:
        ends = [best.made.ends[w] for w in stages[stage]]
        for changed in transfers(shares[stage], kinds[stage], ends):
            runs = list(best.runs)
            runs[stage] = line_of(stage, changed)
            yield changed, runs

    return _settled(search, best, shares, uneven, options)


def _settled(
    search: RouteSearch,
    best: Found,
    shares: list[list[int]],
    parts: Sequence[int],
    options: Callable[[int, Found], Iterator[tuple[list[int], Runs]]],
) -> Found:
    """Change the shares of one of the `parts` after another, as long as routes get better.

    `options`: other shares of a part, with their routes, beside the best ones. Those that are
    better take the place of `shares[part]`.
    """
    improved = True
    while improved and not search.spent:
        improved = False
        for part in parts:
            for changed, runs in options(part, best):
                tried = search.try_runs(runs, best)
                if tried is not best:
                    best, shares[part], improved = tried, changed, True
                    break
    return best


def _moved(schedule: Schedule) -> int:
    stages = schedule.stages
    return sum(
        op.home != worker // stages and op.kind.value == "F"
        for worker, line in enumerate(schedule.order)
        for op in line
    )
