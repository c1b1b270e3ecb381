"""The search for dispatch rules: families that are known to work, then single changes by chance.

Results of long annealing have a structure, and rules of few numbers reproduce most of it: stages
above a slow link hurry forwards (first in first out, memory permitting) while those below hold them
back for gradients; the stages nearest to the first hold microbatches longest and so recompute most.
Hence families over a *prefix* of the stages, then changes of one number on a stage, or on all
stages before or after it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from megatron_adaptra.base.units import ten_digits
from megatron_adaptra.plan.pipeline.search.dispatch import Rule, dispatch
from megatron_adaptra.plan.pipeline.search.job_shop import JobShop, Order
from megatron_adaptra.plan.pipeline.search.search_budget import SearchBudget, late

Rules = tuple[Rule, ...]
Change = dict[str, Any]  # fields of a Rule
COST = 6  # visits that dispatching and timing one op counts as
THRESHOLDS = ((1.0, 1.0), (1.0, 0.3), (0.7, 0.3))  # (forward, weight) of Rule
PREFIXES = 8
RESERVE = 0.15
CLOSE = 1.02  # times the best order's seconds, above which an order is of no use
ADOPTED = 6
KNOWN_TRIES = 400  # changes in a row that were known already: the search has run dry


class RuleResult(NamedTuple):
    """A result holds rules and their order; sorted, the fastest of least memory comes first."""

    seconds: float
    peak: float  # sum over the stages
    serial: int
    rules: Rules
    order: Order


class RuleSearch:
    """A rule search finds the rules with the fastest order, of these the one that holds least.

    `bound`: seconds that no order beats. `until`: the share of the effort at which to stop.
    """

    def __init__(self, shop: JobShop, effort: SearchBudget, bound: float) -> None:
        self.shop, self.effort, self.bound = shop, effort, bound
        self.recompute = shop.conditions.recompute
        self.ops = shop.count * shop.positions * 3
        self.known: dict[Rules, RuleResult | None] = {}
        self.random = random.Random(0)
        self.best: RuleResult | None = None

    def run(self, until: float) -> None:
        """Search until the share `until` of the effort is spent, or the bound is reached."""
        if self.best is None:
            self.begin(until)
        idle = 0
        while self.best is not None and not self.over(until) and idle < KNOWN_TRIES:
            rules = self.changed()
            idle = idle + 1 if rules in self.known else 0
            self.attempt(rules)

    def begin(self, until: float) -> None:
        """Try the thresholds, then the families, each from the best so far."""
        stages = self.shop.stages
        for deep in (True, False) if self.shop.chunks > 1 else (True,):
            for forward, weight in THRESHOLDS:
                if self.best is not None and late(self.effort.end):
                    return
                self.attempt((Rule(forward, weight, depth_first=deep),) * stages)
        for family in self.families() if self.best is not None else ():
            if self.over(until):
                break
            self.attempt(family)

    def adopt(self, other: RuleSearch) -> None:
        """Start from the best rules of another search."""
        for tuned in other.leaders(ADOPTED):
            self.attempt(tuned.rules)

    def leaders(self, most: int) -> list[RuleResult]:
        """Return the best results, one per distinct time, at most so many: `most`."""
        ranked = sorted(t for t in self.known.values() if t is not None)
        return [next(same) for _, same in groupby(ranked, lambda t: ten_digits(t.seconds))][:most]

    @property
    def done(self) -> bool:
        """True where the best order takes no more than the bound: none is faster."""
        return self.best is not None and self.best.seconds <= self.bound * (1 + 1e-9)

    def over(self, until: float) -> bool:
        """Return whether to stop: at the bound, or once the share `until` is spent."""
        return self.done or self.effort.spent >= until

    def attempt(self, rules: Rules) -> None:
        """Dispatch by these rules; they become the best if they are no slower."""
        if rules in self.known:
            return
        limit = math.inf if self.best is None else self.best.seconds * CLOSE
        end = math.inf if self.best is None else self.effort.end
        order = dispatch(self.shop, rules, self.recompute, limit, end)
        self.effort.spend(COST * self.ops)
        timing = self.shop.time(order) if order is not None else None
        self.known[rules] = None
        if order is None or timing is None:
            return
        peak = sum(self.shop.peaks(order))
        tuned = RuleResult(timing.makespan, peak, len(self.known), rules, order)
        self.known[rules] = tuned
        if self.best is None or tuned.seconds <= self.best.seconds * (1 + 1e-12):
            self.best = tuned

    def families(self) -> Iterator[Rules]:
        """Yield rules with changes that have proven themselves, on some prefixes of the stages."""
        prefixes, reserve = self.prefixes(), {"reserve": RESERVE}
        if self.recompute:
            for b in prefixes:
                yield self.by_prefix(b, reserve, {"reserve": 0.0}, forward=1.0, weight=0.3)
        for a in prefixes:
            hurry, wait = ({"forward_first": x, "make_room": x} for x in (True, False))
            if a:
                yield self.by_prefix(a, hurry, wait)
            yield self.by_prefix(a, hurry, wait, forward=0.7, weight=0.3)
        if self.recompute:
            for b in prefixes:
                yield self.by_prefix(b, reserve, {"reserve": 0.0})
            for a in prefixes[1:]:
                yield self.by_prefix(a, {"recompute_early": True}, {"recompute_early": False})
            for more in (1, 2, 4, 8):
                yield self.deeper(more)
            for b in prefixes[:-1]:
                yield self.by_prefix(
                    b, {"recomputed_in_warmup": False}, {"recomputed_in_warmup": True}
                )

    def prefixes(self) -> list[int]:
        """Return some numbers of stages, from none to all."""
        stages = self.shop.stages
        parts = min(stages, PREFIXES)
        return sorted({round(i * stages / parts) for i in range(parts + 1)})

    def by_prefix(self, end: int, inside: Change, after: Change, **both: Any) -> Rules:
        """Return the best rules with `inside` on the stages before `end`, `after` from there on.

        `inside` and `after` are changes of a rule's fields; `both`: those on all stages.
        """
        assert self.best is not None
        return tuple(
            rule._replace(**(inside if stage < end else after), **both)
            for stage, rule in enumerate(self.best.rules)
        )

    def deeper(self, more: int) -> Rules:
        """Return the best rules with at most `more` microbatches in flight beyond the budget."""
        assert self.best is not None
        budgets = zip(self.best.rules, self.shop.budget, strict=True)
        return tuple(rule._replace(in_flight=budget + more) for rule, budget in budgets)

    def changed(self) -> Rules:
        """Return the best rules with one number changed on some stages."""
        assert self.best is not None
        rng, stages = self.random, self.shop.stages
        kind = rng.random()
        stage = rng.randrange(stages)
        first, end = (
            (stage, stage + 1) if kind < 0.5 else (0, stage + 1) if kind < 0.75 else (stage, stages)
        )
        change = self.change(stage)
        return tuple(
            rule._replace(**change) if first <= s < end else rule
            for s, rule in enumerate(self.best.rules)
        )

    def change(self, stage: int) -> Change:
        """Choose a change of one number, at random, that makes sense on `stage`."""
        rng = self.random
        options: list[tuple[float, str, Iterable[Any]]] = [
            (0.15, "forward", (0.5, 0.7, 1.0)),
            (0.22, "weight", (0.0, 0.3, 0.5, 1.0)),
            (0.12, "make_room", (False, True)),
            (0.12, "forward_first", (False, True)),
        ]
        budget = self.shop.budget[stage]
        if budget < self.shop.count:
            depths = [budget + more for more in (-4, -3, -2, -1, math.inf)]
            if self.recompute:
                depths += [budget + more for more in (1, 2, 3, 4, 6, 8)]
            options.append((0.25, "in_flight", depths))
        if self.recompute:
            options += [
                (0.2, "reserve", (0.0, 0.15, 0.3, 0.5, 0.8)),
                (0.06, "recomputed_in_warmup", (False, True)),
                (0.08, "recompute_early", (False, True)),
                (0.06, "recomputed_first", (False, True)),
            ]
        if self.shop.chunks > 1:
            options.append((0.2, "depth_first", (False, True)))
        weights = [weight for weight, _, _ in options]
        _, name, values = rng.choices(options, weights)[0]
        return {name: rng.choice(list(values))}


def shorter(shop: JobShop) -> JobShop | None:
    """Return the job with fewer microbatches, to tune rules on; None where that saves little."""
    c = shop.conditions
    count = max(3 * c.stages, 24)
    if shop.chunks > 1:
        count = math.ceil(count / c.stages) * c.stages
    return JobShop(replace(c, microbatches=count)) if 2 * count <= c.microbatches else None
