"""Plans for small jobs of several replicas against proven optima, and these against everything."""

import random
from itertools import pairwise, permutations, product

import pytest
from replica_cases import cases, small_job
from replica_exact import solve_replicas

from megatron_adaptra.errors import ScheduleError
from megatron_adaptra.ir.check import check
from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.model.replica_bounds import replica_bound
from megatron_adaptra.plan.reroute import plan_replicas
from megatron_adaptra.sim.clock import simulate

pytestmark = [pytest.mark.large, pytest.mark.long]

CASES, OPS = 20, 20_000  # of 200, with a part of the search; docs/evidence/planner.md has them all
ALMOST_ALL = 0.8
TIGHT = 1e-9


@pytest.fixture(scope="module")
def planned(request):
    full = request.config.getoption("--full")
    return list(cases(0, 200 if full else CASES, OPS))


def test_the_bound_is_never_above_the_optimum(planned):
    for seed, plan, best in planned:
        assert best.proven, f"seed {seed}"
        assert plan.lower_bound <= best.seconds + TIGHT, f"seed {seed}"


def test_plans_are_optimal_or_within_their_gap(planned):
    optimal = 0
    for seed, plan, best in planned:
        assert plan.predicted >= best.seconds - TIGHT, f"seed {seed}"
        assert best.seconds >= plan.predicted / (1 + plan.gap) - TIGHT, f"seed {seed}"
        optimal += plan.predicted <= best.seconds + TIGHT
    assert optimal >= ALMOST_ALL * len(planned)


def test_a_job_whose_optimum_needs_a_worker_that_waits_for_the_slower_message():
    """The first to arrive would hold the only place in memory, on the only worker of its stage."""
    c = small_job(46)
    assert plan_replicas(c, ops=OPS).predicted == solve_replicas(c, _plain(c)).seconds == 43


def test_a_job_whose_optimum_needs_a_weight_half_that_waits_for_a_forward():
    c = small_job(10)
    assert plan_replicas(c, ops=OPS).predicted == solve_replicas(c, _plain(c)).seconds == 32


# --- trying everything ---------------------------------------------------------------------------


def _plain(c: ReplicaConditions) -> Schedule:
    """One microbatch after another through the first worker of each stage."""
    lines: list[tuple[Op, ...]] = [()] * c.workers
    kinds = (Kind.F, *((Kind.I, Kind.W) if c.pipeline.split else (Kind.B,)))
    for s in range(c.stages):
        units = product(range(c.replicas), range(c.microbatches))
        lines[c.alive(s)[0]] = tuple(Op(kind, m, 0, home) for home, m in units for kind in kinds)
    return Schedule(tuple(lines), c.microbatches, replicas=c.replicas)


def _orders(c: ReplicaConditions, units: list[int]) -> list[tuple[Op, ...]]:
    """Every line of a worker that runs these units."""
    back = [Kind.I, Kind.W] if c.pipeline.split else [Kind.B]
    chains = [[Op(k, u % c.microbatches, 0, u // c.microbatches) for k in (Kind.F, *back)]
              for u in units]  # fmt: skip
    ops = [op for chain in chains for op in chain]
    after = {b: a for chain in chains for a, b in pairwise(chain)}
    return [
        line
        for line in permutations(ops)
        if all(line.index(a) < line.index(b) for b, a in after.items())
    ]


def best_of_all(c: ReplicaConditions) -> tuple[float, int]:
    """The least seconds, and how many schedules can run."""
    best, ran, units = float("inf"), 0, range(c.replicas * c.microbatches)
    budget = [0 if w in c.failed else b for w, b in enumerate(c.activation_budget)]
    places = [(u, s) for u in units for s in range(c.stages)]
    for choice in product(*(c.alive(s) for _, s in places)):
        mine: list[list[int]] = [[] for _ in range(c.workers)]
        for (unit, _), worker in zip(places, choice, strict=True):
            mine[worker].append(unit)
        for order in product(*(_orders(c, line) for line in mine)):
            program = lower(Schedule(order, c.microbatches, replicas=c.replicas))
            try:
                check(program, budget)
            except ScheduleError:
                continue
            ran += 1
            best = min(best, simulate(program, c).makespan)
    return best, ran


@pytest.mark.parametrize("seed", range(4))
def test_as_fast_as_the_best_of_all(seed):
    """Two replicas of two stages with one microbatch each, over paths and ports that take time."""
    rng = random.Random(seed)
    slow = {w: float(rng.randint(1, 3)) for w in range(4)}
    paths = {
        way: LinkState(float(rng.choice((0, 2))), 1 / rng.choice((1, 3)))
        for a, b in product((0, 2), (1, 3))
        for way in ((a, b), (b, a))
    }
    ports = {rng.randrange(4): 1 / 4} if seed % 2 else {}
    times = [tuple(float(rng.randint(1, 3)) for _ in range(2)) for _ in range(3)]
    budget = rng.choice((1.0, 1.5, 2.0))
    pipeline = Conditions(
        1,
        times[0],
        times[1],
        times[2],
        message_bytes=1.0,
        split=seed < 2,
        activation_budget=(budget,) * 2,
    )
    failed = frozenset({rng.randrange(4)} if seed < 3 else ())
    c = ReplicaConditions(pipeline, 2, failed, slow, paths, ports)
    best, tried = best_of_all(c)
    found = solve_replicas(c, _plain(c))
    assert found.proven
    assert found.seconds == best, f"{tried} tried: {c}"
    assert replica_bound(c) <= best + TIGHT
