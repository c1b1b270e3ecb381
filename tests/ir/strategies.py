"""Random jobs and schedules. The rules of a pipeline are written anew here, as a second opinion."""

from __future__ import annotations

import math
import random

from hypothesis import strategies as st

from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.op import COMPUTE, Kind, Op
from megatron_adaptra.ir.schedule import Schedule, warmup_line

seeds = st.integers(0, 2**32 - 1)
small = st.integers(0, 200)
seconds = st.just(0.0) | st.floats(1e-6, 100)
ops = st.builds(Op, st.sampled_from(Kind), small, st.integers(0, 9), st.none() | small)
work = st.builds(Op, st.sampled_from(sorted(COMPUTE)), small, st.integers(0, 9), st.none() | small)
lines = st.lists(st.lists(work, max_size=6).map(tuple), min_size=1, max_size=4).map(tuple)
schedules = st.builds(
    Schedule, lines, st.integers(1, 99), st.integers(1, 9), st.text(max_size=9), st.text()
)


@st.composite
def conditions(draw: st.DrawFn, stages: int | None = None, most: int = 16) -> Conditions:
    """Any job: zeros, ties and infinities included."""
    p = stages or draw(st.integers(1, 6))
    m = draw(st.integers(1, most))
    per_stage = st.tuples(*[seconds] * p)
    pairs = [(i, i + 1) for i in range(p - 1)] + [(i + 1, i) for i in range(p - 1)]
    state = st.builds(LinkState, seconds, st.just(math.inf) | st.floats(0.1, 10), st.just(0.0))
    links = draw(st.dictionaries(st.sampled_from(pairs), state)) if pairs else {}
    limit = st.just(math.inf) | st.floats(1, 20)
    budget = draw(st.just(()) | limit.map(lambda one: (one,) * p) | st.tuples(*[limit] * p))
    return Conditions(
        m,
        draw(per_stage),
        draw(per_stage),
        draw(per_stage),
        links,
        message_bytes=draw(st.sampled_from([0.0, 1.0])),
        activation_budget=budget,
        step_seconds=draw(st.sampled_from([0.0, 1.5])),
        cores=draw(st.none() | st.floats(0.5, 7)),
    )


def random_conditions(rng: random.Random, stages: int, count: int, **more: object) -> Conditions:
    """A job whose times have nothing in common, so that no two events fall together."""
    ways = [(a, b) for a in range(stages) for b in range(stages) if a != b]
    links = {
        way: LinkState(
            rng.choice([0.0, rng.uniform(0, 30)]), rng.choice([math.inf, rng.uniform(0.1, 2)])
        )
        for way in ways
        if rng.random() < 0.7
    }
    forward, backward, weight = (
        tuple(rng.uniform(0.5, 9) for _ in range(stages)) for _ in range(3)
    )
    return Conditions(count, forward, backward, weight, links, rng.choice([0.0, 1.0]), **more)  # type: ignore[arg-type]


def random_depths(rng: random.Random, stages: int, count: int) -> tuple[int, ...]:
    """Warmup depths that can run: they never increase towards the last stage."""
    return tuple(sorted((rng.randint(1, count) for _ in range(stages)), reverse=True))


def of_depths(depths: tuple[int, ...], count: int) -> Schedule:
    return Schedule(tuple(warmup_line(depth, count) for depth in depths), count)


def random_schedule(
    rng: random.Random, stages: int, count: int, chunks: int = 1, split: float = 0, again: float = 0
) -> Schedule:
    """Any order that can run: ops are taken at random among those whose inputs are there.

    `split` and `again`: the share of backwards in two halves, and of recomputed forwards.
    """
    last = stages * chunks - 1
    left: dict[tuple[str, int, int], list[tuple[str, int, int]]] = {}  # op -> what it waits for
    for k in range(count):
        for x in range(last + 1):
            halves, recomputed = rng.random() < split, rng.random() < again
            left["F", k, x] = [("F", k, x - 1)] if x else []
            if recomputed:
                left["R", k, x] = [("F", k, x)]
            gradient = [("B", k, x + 1)] if x < last else []  # B: either kind of backward
            left["B", k, x] = [("R" if recomputed else "F", k, x), *gradient]
            if halves:
                left["W", k, x] = [("B", k, x)]
    halved = {(k, x) for kind, k, x in left if kind == "W"}
    order: list[list[Op]] = [[] for _ in range(stages)]
    while left:
        kind, k, x = rng.choice([op for op, needed in left.items() if not set(needed) & set(left)])
        del left[kind, k, x]
        name = "I" if kind == "B" and (k, x) in halved else kind
        order[x % stages].append(Op(Kind(name), k, x // stages))
    return Schedule(tuple(map(tuple, order)), count, chunks)
