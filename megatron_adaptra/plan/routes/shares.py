"""Shares of a stage's microbatches between workers, and which of its own each gives away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_adaptra.ir.routes import worker_name
from megatron_adaptra.ir.schedule import Line, Schedule
from megatron_adaptra.plan.routes.chains import Chains
from megatron_adaptra.plan.routes.list_schedule import Runs, Workers


def home_runs(workers: Workers, chains: Chains) -> Runs:
    """Return routes with each microbatch on the chain of its home."""
    return [
        [chains[unit // workers.count][stage] for unit in range(workers.units)]
        for stage in range(workers.stages)
    ]


def reassigned(have: dict[int, list[int]], shares: dict[int, int]) -> dict[int, int]:
    """Choose which units move to which worker, so that each worker has its share.

    The units that a worker gives away are spread evenly over its own, and those that another one
    gets are spread evenly over all units given away.

    Args:
        have: per worker, its units, in the order in which it runs them.
        shares: per worker, how many it should have.

    Returns:
        By unit, the worker that gets it.
    """
    given: list[int] = []
    for worker, units in have.items():
        surplus = len(units) - shares[worker]
        if surplus > 0:
            given += [units[(2 * i + 1) * len(units) // (2 * surplus)] for i in range(surplus)]
    wants = {w: shares[w] - len(units) for w, units in have.items() if shares[w] > len(units)}
    got = dict.fromkeys(wants, 0)
    moved: dict[int, int] = {}
    place = {unit: i for units in have.values() for i, unit in enumerate(units)}
    for unit in sorted(given, key=lambda unit: (place[unit], unit)):
        worker = min(wants, key=lambda w: ((got[w] + 0.5) / wants[w], w))
        got[worker] += 1
        moved[unit] = worker
        if got[worker] == wants[worker]:
            del wants[worker]
    return moved


def microbatch_seconds(workers: Workers, worker: int) -> float:
    """Return how long one microbatch keeps `worker` busy: its ops, or its port."""
    c = workers.conditions
    if worker in c.failed:
        return float("inf")
    compute = workers.forward[worker] + workers.backward[worker] + workers.weight[worker]
    stage = worker % workers.stages
    ways = (stage > 0) + (stage < workers.stages - 1)  # messages that it sends, and receives
    return max(compute, ways * workers.port[worker])


def shifted(workers: Workers, chains: Chains, shares: Sequence[int]) -> Runs:
    """Move whole microbatches to other chains, so that chain i has `shares[i]` units."""
    have = {d: list(range(d * workers.count, (d + 1) * workers.count)) for d in range(len(chains))}
    moved = reassigned(have, dict(enumerate(shares)))
    return [
        [chains[moved.get(unit, unit // workers.count)][stage] for unit in range(workers.units)]
        for stage in range(workers.stages)
    ]


def rerouted(workers: Workers, base: Runs, stage: int, shares: dict[int, int]) -> list[int]:
    """Return the line of `stage` in `base`, with as many units per worker as its `shares`."""
    line = list(base[stage])
    have: dict[int, list[int]] = {worker: [] for worker in shares}
    for unit in workers.turns:
        have[line[unit]].append(unit)
    for unit, worker in reassigned(have, shares).items():
        line[unit] = worker
    return line


def one_back(schedule: Schedule, worker: int, seconds: Callable[[Schedule], float]) -> Schedule:
    """Return the `schedule` with one microbatch of the worker's home at home on it again.

    So a worker from which a plan has taken all shows how long one takes it. Of all microbatches it
    is the one that makes an iteration the least longer.

    Args:
        schedule: of several replicas.
        worker: without any op.
        seconds: what an iteration of a schedule takes.
    """
    home, stage = divmod(worker, schedule.stages)
    options = [_moved(schedule, worker, home, stage, i) for i in range(schedule.microbatches)]
    return min(options, key=seconds)


def _moved(schedule: Schedule, worker: int, home: int, stage: int, microbatch: int) -> Schedule:
    runner = schedule.routes.worker(stage, microbatch, home)
    lines: list[Line] = list(schedule.order)
    which = home, microbatch
    lines[worker] = tuple(op for op in lines[runner] if (op.home, op.microbatch) == which)
    lines[runner] = tuple(op for op in lines[runner] if (op.home, op.microbatch) != which)
    why = f"worker {worker_name(worker, schedule.stages)} runs one microbatch"
    return replace(schedule, order=tuple(lines), why=why)
