"""The search for dispatch rules: families that are known to work, then single changes by chance.

What long annealing finds has a structure, and rules of few numbers reproduce most of it: stages
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

from megatron_adaptra.plan.dispatch import Rule, dispatch
from megatron_adaptra.plan.job_shop import Order, Shop
from megatron_adaptra.plan.search_budget import Effort

Rules = tuple[Rule, ...]
COST = 6  # visits that dispatching and timing one op is worth
THRESHOLDS = ((1.0, 1.0), (1.0, 0.3), (0.7, 0.3))  # (forward, weight) of Rule
PREFIXES = 8
SPARE = 0.15
CLOSE = 1.02  # an order that is slower than the best by more is of no use
ADOPTED = 6
IDLE_TRIES = 400  # changes in a row that were known already: the search has run dry


class Tuned(NamedTuple):
    seconds: float
    peak: float  # sum over the stages
    serial: int
    rules: Rules
    order: Order


class Tuner:
    """`run` looks for the rules whose order is fastest, and of these the one that holds least."""

    def __init__(self, shop: Shop, effort: Effort, bound: float) -> None:
        self.shop, self.effort, self.bound = shop, effort, bound
        self.recompute = shop.conditions.recompute
        self.ops = shop.count * shop.positions * 3
        self.known: dict[Rules, Tuned | None] = {}
        self.random = random.Random(0)
        self.best: Tuned | None = None

    def run(self, until: float) -> None:
        """Search until that share of the effort is spent, or the bound is reached."""
        if self.best is None:
            self.begin(until)
        idle = 0
        while self.best is not None and not self.over(until) and idle < IDLE_TRIES:
            rules = self.changed()
            idle = idle + 1 if rules in self.known else 0
            self.attempt(rules)

    def begin(self, until: float) -> None:
        """The families, each from the best so far."""
        stages = self.shop.stages
        for deep in (True, False) if self.shop.chunks > 1 else (True,):
            for forward, weight in THRESHOLDS:
                self.attempt((Rule(forward, weight, deep=deep),) * stages)
        for family in self.families() if self.best is not None else ():
            if self.over(until):
                break
            self.attempt(family)

    def adopt(self, other: Tuner) -> None:
        """Start from the best rules of another search."""
        for tuned in other.leaders(ADOPTED):
            self.attempt(tuned.rules)

    def leaders(self, most: int) -> list[Tuned]:
        """The best, one for each time that was reached."""
        ranked = sorted(t for t in self.known.values() if t is not None)
        return [next(same) for _, same in groupby(ranked, lambda t: f"{t.seconds:.9e}")][:most]

    @property
    def done(self) -> bool:
        """Whether nothing is faster."""
        return self.best is not None and self.best.seconds <= self.bound * (1 + 1e-9)

    def over(self, until: float) -> bool:
        return self.done or self.effort.spent >= until

    def attempt(self, rules: Rules) -> None:
        """Dispatch by these rules; they become the best if they are no slower."""
        if rules in self.known:
            return
        limit = math.inf if self.best is None else self.best.seconds * CLOSE
        order = dispatch(self.shop, rules, self.recompute, limit)
        self.effort.spend(COST * self.ops)
        timing = self.shop.time(order) if order is not None else None
        self.known[rules] = None
        if order is None or timing is None:
            return
        peak = sum(self.shop.peaks(order))
        tuned = Tuned(timing.makespan, peak, len(self.known), rules, order)
        self.known[rules] = tuned
        if self.best is None or tuned.seconds <= self.best.seconds * (1 + 1e-12):
            self.best = tuned

    def families(self) -> Iterator[Rules]:
        prefixes = self.prefixes()
        if self.recompute:
            for b in prefixes:
                yield self.on(b, {"spare": SPARE}, {"spare": 0.0}, forward=1.0, weight=0.3)
        for a in prefixes:
            hurry, wait = ({"eager": x, "unblock": x} for x in (True, False))
            if a:
                yield self.on(a, hurry, wait)
            yield self.on(a, hurry, wait, forward=0.7, weight=0.3)
        if self.recompute:
            for b in prefixes:
                yield self.on(b, {"spare": SPARE}, {"spare": 0.0})
            for a in prefixes[1:]:
                yield self.on(a, {"ahead": True}, {"ahead": False})
            for more in (1, 2, 4, 8):
                yield self.deeper(more)
            for b in prefixes[:-1]:
                yield self.on(b, {"early": False}, {"early": True})

    def prefixes(self) -> list[int]:
        """Some numbers of stages, from none to all."""
        stages = self.shop.stages
        parts = min(stages, PREFIXES)
        return sorted({round(i * stages / parts) for i in range(parts + 1)})

    def on(self, end: int, inside: dict[str, Any], after: dict[str, Any], **both: Any) -> Rules:
        assert self.best is not None
        return tuple(
            rule._replace(**(inside if stage < end else after), **both)
            for stage, rule in enumerate(self.best.rules)
        )

    def deeper(self, more: int) -> Rules:
        """No stage has more than that beyond its budget in flight."""
        assert self.best is not None
        budgets = zip(self.best.rules, self.shop.budget, strict=True)
        return tuple(rule._replace(depth=budget + more) for rule, budget in budgets)

    def changed(self) -> Rules:
        """The best rules with one number changed on some stages."""
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

    def change(self, stage: int) -> dict[str, Any]:
        rng = self.random
        options: list[tuple[float, str, Iterable[Any]]] = [
            (0.15, "forward", (0.5, 0.7, 1.0)),
            (0.22, "weight", (0.0, 0.3, 0.5, 1.0)),
            (0.12, "unblock", (False, True)),
            (0.12, "eager", (False, True)),
        ]
        budget = self.shop.budget[stage]
        if budget < self.shop.count:
            depths = [budget + more for more in (-4, -3, -2, -1, math.inf)]
            if self.recompute:
                depths += [budget + more for more in (1, 2, 3, 4, 6, 8)]
            options.append((0.25, "depth", depths))
        if self.recompute:
            options += [
                (0.2, "spare", (0.0, 0.15, 0.3, 0.5, 0.8)),
                (0.06, "early", (False, True)),
                (0.08, "ahead", (False, True)),
                (0.06, "light_first", (False, True)),
            ]
        if self.shop.chunks > 1:
            options.append((0.2, "deep", (False, True)))
        weights = [weight for weight, _, _ in options]
        _, name, values = rng.choices(options, weights)[0]
        return {name: rng.choice(list(values))}


def shorter(shop: Shop) -> Shop | None:
    """The same job with fewer microbatches, to tune rules on; None where that saves little."""
    c = shop.conditions
    count = max(3 * c.stages, 24)
    if shop.chunks > 1:
        count = math.ceil(count / c.stages) * c.stages
    return Shop(replace(c, microbatches=count)) if 2 * count <= c.microbatches else None
