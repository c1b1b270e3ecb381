"""Lateness, ports and paths as a seed draws them, and all the plans that builders have for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from seeding import new_seed

from benchmarks.common import equal_ports
from megatron_adaptra.ir.collective import CollectivePlan
from megatron_adaptra.ir.conditions import LinkState
from megatron_adaptra.plan.reductions.builders import (
    direct,
    halving_doubling,
    ring,
    shares_without,
    sorted_chain,
)
from megatron_adaptra.plan.reductions.choice import Choice
from megatron_adaptra.plan.reductions.figures import Figures
from megatron_adaptra.plan.reductions.stragglar import stragglar
from megatron_adaptra.sim.ports import run_on_ports

KINDS = (*["late"] * 4, *["two late"] * 2, *["slow port"] * 2, *["slow path"] * 2, *["none"] * 2)


def drawn(rng: random.Random, kind: str) -> tuple[Figures, set[int]]:
    """Figures of a `kind`, and the ranks that differ from others. Buffers of 40 to 160 ms."""
    ranks = rng.randint(4, 7)
    rate = rng.choice([20e6, 50e6])
    buffer = rng.uniform(0.04, 0.16)
    late, rates, paths = [0.0] * ranks, [rate] * ranks, {}
    some = set(rng.sample(range(ranks), 1 + (kind in ("two late", "slow path"))))
    if kind in ("late", "two late"):
        for rank in some:
            late[rank] = buffer * rng.uniform(0.2, 3)
    elif kind == "slow port":
        for rank in some:
            rates[rank] *= rng.uniform(0.3, 0.8)
    elif kind == "slow path":
        state = LinkState(rng.uniform(0.05, 0.3) * buffer, rate * rng.uniform(0.2, 0.8))
        a, b = some
        paths = {(a, b): state, (b, a): state}
    delay = 0.3e-3 if kind == "none" else rng.choice([0.3e-3, 3e-3])
    ports = equal_ports(rates, delay, 0.1e-3, paths=paths)
    return Figures(int(rate * buffer), ports, tuple(late), 4 * buffer), some


def native(figures: Figures) -> float:
    """Seconds after the last arrival of gloo's ring, each step of which crosses two delays."""
    ports = figures.ports
    paths = {way: state._replace(delay=2 * state.delay) for way, state in ports.paths.items()}
    far = replace(ports, delay=2 * ports.delay, paths=paths)
    return after(ring(figures.ranks, 2), replace(figures, ports=far))


def after(plan: CollectivePlan, figures: Figures) -> float:
    """The same of a `plan`; what gradients take to become ready hides all but the last ones."""
    f, hidden = figures, figures.buffers
    of = [run_on_ports(plan, n, f.ports, f.lateness).after_arrival for n in (f.nbytes, hidden.last)]
    return max(of[0] - hidden.overlap, of[1]) if hidden.overlap else of[0]


def seconds_of(choice: Choice, figures: Figures) -> float:
    """The same of what was chosen."""
    plan = choice.plan()
    return native(figures) if plan is None else after(plan, figures)


def count_near(
    kinds: Iterable[str],
    choose: Callable[[random.Random, str, Figures], Choice],
    slowest: float = 1.0,
) -> int:
    """Of how many patterns what is chosen takes at most 10 % more than the best builder's plan.

    Args:
        kinds: of patterns to draw; that of "rotating" has nobody late.
        choose: what is chosen for a kind's figures, with the numbers drawn so far.
        slowest: the most that it may take of native's time; asserted.
    """
    rng, near = random.Random(new_seed()), 0
    for kind in kinds:
        figures, some = drawn(rng, "none" if kind == "rotating" else kind)
        choice = choose(rng, kind, figures)
        seconds = seconds_of(choice, figures)
        best = min(after(plan, figures) for plan in builders(figures, some))
        print(f"{kind}, {figures.ranks} ranks: {choice}, {seconds / best:.2f} of the best")
        assert seconds <= slowest * native(figures)
        near += seconds <= 1.1 * best
    return near


def builders(figures: Figures, some: set[int]) -> Iterator[CollectivePlan]:
    """All that a user could name, in several numbers of pieces."""
    ranks = figures.ranks
    yield halving_doubling(ranks)
    for cut in (1, 2, 4):
        yield ring(ranks, cut)
    for pieces in (4, 8, 16, 32):
        for count in range(len(some) + 1):
            for late in combinations(sorted(some), count):
                yield direct(shares_without(ranks, late), pieces)
    for k in (1, 2, 4, 8):
        for rank in some:
            yield stragglar(ranks, rank, k)
    for pieces in (16, 64):
        yield sorted_chain(_by_arrival(figures.lateness), pieces)


def _by_arrival(lateness: Sequence[float]) -> list[int]:
    return sorted(range(len(lateness)), key=lambda rank: lateness[rank])
