"""Random jobs and schedules. The rules of a pipeline are written anew here, as a second opinion."""

from __future__ import annotations

import math
import random

from hypothesis import strategies as st

from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.op import COMPUTE, Kind, Op
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule, warmup_line

Work = tuple[str, int | None, int, int]  # kind, home, microbatch, position

seeds = st.integers(0, 2**32 - 1)
small = st.integers(0, 200)
seconds = st.just(0.0) | st.floats(1e-6, 100)
ops = st.builds(Op, st.sampled_from(Kind), small, st.integers(0, 9), st.none() | small)
work = st.builds(Op, st.sampled_from(sorted(COMPUTE)), small, st.integers(0, 9), st.none() | small)
words = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)))  # as in files
lines = st.lists(st.lists(work, max_size=6).map(tuple), min_size=1, max_size=4).map(tuple)
schedules = st.builds(Schedule, lines, st.integers(1, 99), st.integers(1, 9), words, words)


@st.composite
def replica_schedules(draw: st.DrawFn) -> Schedule:
    """Of several replicas: whatever can be written down, whether it runs or not."""
    replicas, stages = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    kinds, homes = st.sampled_from(sorted(COMPUTE)), st.integers(0, replicas - 1)
    line = st.lists(st.builds(Op, kinds, small, st.just(0), homes), max_size=4).map(tuple)
    order = draw(st.tuples(*[line] * (stages * replicas)))
    return Schedule(order, draw(st.integers(1, 99)), 1, draw(words), draw(words), replicas)


@st.composite
def replica_conditions(draw: st.DrawFn) -> ReplicaConditions:
    """Any job of several replicas: some dead, infinities included."""
    pipeline = draw(conditions())
    replicas, stages = draw(st.integers(2, 4)), pipeline.stages
    workers = st.integers(0, stages * replicas - 1)
    paths = st.tuples(workers, workers).filter(
        lambda way: abs(way[0] % stages - way[1] % stages) == 1
    )
    rate = st.just(math.inf) | st.floats(0.1, 10)
    limit = st.just(math.inf) | st.floats(1, 20)
    alive = [draw(st.integers(0, replicas - 1)) * stages + stage for stage in range(stages)]
    return ReplicaConditions(
        pipeline,
        replicas,
        draw(st.frozensets(workers)) - set(alive),
        draw(st.dictionaries(workers, st.floats(0.1, 10))),
        draw(st.dictionaries(paths, st.builds(LinkState, seconds, rate, st.just(0.0)), max_size=4))
        if stages > 1
        else {},
        draw(st.dictionaries(workers, rate)),
        draw(st.just(()) | st.tuples(*[limit] * (stages * replicas))),
        draw(st.dictionaries(workers, st.floats(0, 1))),
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
        core_share=draw(st.just(()) | st.tuples(*[st.floats(0, 1)] * p)),
        ports=draw(st.just({}) | st.dictionaries(st.integers(0, p - 1), st.floats(0.1, 10))),
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
    rng: random.Random,
    stages: int,
    count: int,
    chunks: int = 1,
    split: float = 0,
    again: float = 0,
    replicas: int = 1,
    moved: float = 0.5,
) -> Schedule:
    """Any order that can run: ops are taken at random among those whose inputs are there.

    `split` and `again`: the share of backwards in two halves, and of recomputed forwards. `moved`:
    of several replicas, the share of microbatches that any worker of a stage may run there.
    """
    last = stages * chunks - 1
    homes: list[int | None] = [None] if replicas == 1 else [*range(replicas)]
    left: dict[Work, list[Work]] = {}  # op -> what it waits for
    for home in homes:
        for k in range(count):
            for x in range(last + 1):
                halves, recomputed = rng.random() < split, rng.random() < again
                left["F", home, k, x] = [("F", home, k, x - 1)] if x else []
                if recomputed:
                    left["R", home, k, x] = [("F", home, k, x)]
                after: list[Work] = [("R" if recomputed else "F", home, k, x)]
                if x < last:
                    after.append(("B", home, k, x + 1))  # B: either kind of backward
                left["B", home, k, x] = after
                if halves:
                    left["W", home, k, x] = [("B", home, k, x)]
    halved = {work[1:] for work in left if work[0] == "W"}
    runner: dict[tuple[int | None, int, int], int] = {}  # home, microbatch, stage -> replica
    order: list[list[Op]] = [[] for _ in range(stages * replicas)]
    users: dict[Work, list[Work]] = {work: [] for work in left}
    for work, needed in left.items():
        for other in needed:
            users[other].append(work)
    missing = {work: len(needed) for work, needed in left.items()}
    ready = [work for work, number in missing.items() if not number]
    while ready:
        kind, home, k, x = work = ready.pop(rng.randrange(len(ready)))
        for other in users[work]:
            missing[other] -= 1
            if not missing[other]:
                ready.append(other)
        mine = home, k, x % stages
        if mine not in runner:
            runner[mine] = rng.randrange(replicas) if rng.random() < moved else home or 0
        name = "I" if kind == "B" and work[1:] in halved else kind
        op = Op(Kind(name), k, x // stages, home)
        order[runner[mine] * stages + x % stages].append(op)
    return Schedule(tuple(map(tuple, order)), count, chunks, replicas=replicas)


def random_replicas(rng: random.Random, split: float = 0.5, again: float = 0.3) -> Schedule:
    """A small `random_schedule` of several replicas."""
    shape = rng.randint(1, 4), rng.randint(1, 4), 1
    return random_schedule(rng, *shape, split, again, rng.randint(2, 4), rng.random())


def random_replica_conditions(
    rng: random.Random, schedule: Schedule, **more: object
) -> ReplicaConditions:
    """Costs of all workers of a `schedule`: slow ones, paths and ports of their own.

    `more`: of the pipeline.
    """
    stages, replicas = schedule.stages, schedule.replicas
    pipeline = random_conditions(rng, stages, schedule.microbatches, **more)
    workers = range(stages * replicas)
    rates = [math.inf, rng.uniform(0.1, 2)]
    return ReplicaConditions(
        pipeline,
        replicas,
        slow={worker: rng.uniform(0.5, 4) for worker in workers if rng.random() < 0.4},
        paths={
            (a, b): LinkState(rng.choice([0.0, rng.uniform(0, 30)]), rng.choice(rates))
            for a in workers
            for b in workers
            if abs(a % stages - b % stages) == 1 and rng.random() < 0.3
        },
        ports={worker: rng.choice(rates) for worker in workers if rng.random() < 0.4},
    )
