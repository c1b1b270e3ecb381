"""Slow replicas, workers, paths and ports as a seed draws them, and what each remedy leaves there.

A ladder is climbed by what is measured, which is off by a few percent of what comes; what it
chooses is then simulated in what comes, beside each remedy that is planned for just that.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from common import equal_ports
from remedies import Reduction, Situation, plan_remedies, seconds_of

from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.plan.ladder import FULL

KINDS = (
    *["slow replica"] * 3, "two slow replicas", *["slow worker"] * 2, *["slow path"] * 2,
    *["slow replica, long reduction"] * 2, "slow port", "none",
)  # fmt: skip
NOISE = 0.05  # share by which what is measured is off, at most
OPS = 20_000  # of a search for routes


@dataclass(frozen=True)
class Pattern:
    """One of them. `comes`: what is so; `measured`: what a training knows of it."""

    kind: str
    comes: Situation
    measured: Situation


@dataclass(frozen=True)
class Outcome:
    """Seconds of an iteration. `auto`: of what is `chosen`; `each`: by remedy that can be had."""

    pattern: Pattern
    chosen: str
    predicted: float
    full: float
    auto: float
    each: dict[str, float]

    @property
    def best(self) -> str:
        """The name of the best single remedy; of equals the cheapest."""
        return min(self.each, key=lambda name: self.each[name])

    @property
    def of_full(self) -> float:
        return self.auto / self.full

    @property
    def of_best(self) -> float:
        return self.auto / self.each[self.best]


def drawn(rng: random.Random, kind: str) -> Pattern:
    """A job of 3 to 5 replicas whose microbatches take some 30 ms a stage."""
    replicas, stages, count = rng.randint(3, 5), rng.randint(1, 3), rng.randint(4, 8)
    if kind in ("slow path", "slow worker"):
        stages = max(2, stages)
    forward = tuple(rng.uniform(9e-3, 11e-3) for _ in range(stages))
    slow: dict[int, float] = {}
    paths: dict[tuple[int, int], LinkState] = {}
    iteration = (count + stages - 1) * 30e-3
    buffer, rates = iteration * rng.uniform(0.05, 0.2), [50e6] * replicas
    some = rng.sample(range(replicas), 1 + (kind == "two slow replicas"))
    if "replica" in kind:
        most = 1.4 if "long" in kind else 3.0
        slow = {r * stages + s: rng.uniform(1.1, most) for r in some for s in range(stages)}
        slow = {w: slow[w // stages * stages] for w in slow}
    if "long" in kind:
        buffer = iteration * rng.uniform(0.4, 1.2)
    elif kind == "slow worker":
        slow = {some[0] * stages + rng.randrange(stages): rng.uniform(1.2, 3.0)}
    elif kind == "slow path":
        a = some[0] * stages + rng.randrange(stages - 1)
        state = LinkState(rng.uniform(10e-3, 60e-3))
        paths = {(a, a + 1): state, (a + 1, a): state}
    elif kind == "slow port":
        rates[some[0]] *= rng.uniform(0.3, 0.7)
        buffer = iteration * rng.uniform(0.2, 0.6)
    pipeline = Conditions(
        count, forward, forward, forward, message_bytes=1e5, split=False, step_seconds=5e-3
    )
    c = ReplicaConditions(pipeline, replicas, slow=slow, paths=paths)
    ports = equal_ports(rates, 0.3e-3, 0.1e-3)
    comes = Situation(
        c, Reduction(int(50e6 * buffer / 2), ports), allreduce=rng.random() < 0.8,
        routes=rng.choice(["off", "swap", "auto", "auto"]), ops=OPS,
    )  # fmt: skip
    return Pattern(kind, comes, _measured(rng, comes))


def _measured(rng: random.Random, comes: Situation) -> Situation:
    """The same with errors of measuring; nothing that is well looks slow by them."""
    c, reduction = comes.conditions, comes.reduction
    assert reduction is not None

    def off(value: float) -> float:
        return value * rng.uniform(1 - NOISE, 1 + NOISE)

    by_replica = [rng.uniform(1 - NOISE, 1 + NOISE) for _ in c.all_replicas]
    slow = {w: times * by_replica[w // c.stages] for w, times in c.slow.items()}
    paths = {
        way: LinkState(off(link.delay), link.bandwidth) for way, link in sorted(c.paths.items())
    }
    forward = tuple(off(each) for each in c.pipeline.forward)
    pipeline = replace(c.pipeline, forward=forward, backward_input=forward, backward_weight=forward)
    rates = [off(rate) for rate in reduction.ports.out]
    ports = equal_ports(rates, reduction.ports.delay, reduction.ports.cost)
    return replace(
        comes,
        conditions=replace(c, pipeline=pipeline, slow=slow, paths=paths),
        reduction=replace(reduction, ports=ports),
    )


def outcome(pattern: Pattern, min_gain: float) -> Outcome:
    """What the ladder chooses for a `pattern`, and what that and each remedy take there."""
    ladder = plan_remedies(pattern.measured, min_gain)
    planned = plan_remedies(pattern.comes, min_gain)
    each = {name: seconds_of(pattern.comes, one) for name, one in planned.applied.items()}
    auto = seconds_of(pattern.comes, ladder.applied[ladder.chosen])
    return Outcome(pattern, ladder.chosen, ladder.predicted, each[FULL], auto, each)


def outcomes(seed: int, min_gain: float) -> Iterator[Outcome]:
    """Those of the twelve patterns that a `seed` draws."""
    rng = random.Random(seed)
    for kind in KINDS:
        yield outcome(drawn(rng, kind), min_gain)
