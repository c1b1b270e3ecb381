"""All-reduces, or halves of them, with late ranks: our plans and gloo's own, on the same calls."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_adaptra.base.errors import AdaptraError
from megatron_adaptra.bench.algorithms import measured_plan, possible
from megatron_adaptra.bench.allreduce_options import NATIVE, RING, AllReduceOptions
from megatron_adaptra.bench.clock import Clock
from megatron_adaptra.bench.paths import TIMEOUT
from megatron_adaptra.execute.planned.connected import Connected
from megatron_adaptra.execute.planned.exchange import Exchange
from megatron_adaptra.ir.collective import CollectivePlan, Goal
from megatron_adaptra.sim.ports import run_on_ports

_REPEATS = 97  # values of a buffer: whole numbers, whose sums are exact in any order


class _Cost(NamedTuple):
    """Seconds of a call since the last rank has come, on the last rank that ends; and of CPU."""

    seconds: float
    cpu: float


def rows(options: AllReduceOptions, rank: int) -> list[dict[str, Any]]:
    """A row for each size, lateness and algorithm, on `rank` 0; none on others. They take turns."""
    clock = Clock(options)
    group = dist.group.WORLD
    assert group is not None
    with contextlib.ExitStack() as opened:
        exchanges: dict[str, Exchange] = {}
        for name in options.algorithms:
            if name != NATIVE and possible(name, options.ranks, options.late_ranks):
                # Its own, as in a training: how much TCP sends at once depends on what a
                # connection has carried before.
                connected = Connected.between(group, f"bench {name}", TIMEOUT, "engine")
                opened.callback(connected.close)
                exchanges[name] = connected.exchange
        found = []
        for nbytes in options.sizes:
            plans = {name: measured_plan(name, options, nbytes) for name in exchanges}
            ways: dict[str, Callable[[torch.Tensor], object]] = {
                name: partial(exchanges[name].run, plan=plan) for name, plan in plans.items()
            }
            if NATIVE in options.algorithms:
                ways[NATIVE] = partial(_native, options.goal)
            for late in options.lateness(nbytes):
                costs = _costs(ways, nbytes // 4, late, options, clock)
                if rank == 0:  # the others' would be the same
                    found += [
                        _row(options, nbytes, late, name, plans.get(name), costs) for name in ways
                    ]
        dist.barrier()  # nobody hangs up before all have what they wait for
        return found


def _costs(
    ways: dict[str, Callable[[torch.Tensor], object]],
    count: int,
    late: float,
    options: AllReduceOptions,
    clock: Clock,
) -> dict[str, list[_Cost]]:
    """Of each round, on all ranks the same. The first round opens connections, and is left out."""
    rank, ranks = dist.get_rank(), options.ranks
    values = torch.arange(count) % _REPEATS
    mine = (values + rank).float()
    right = (ranks * values + sum(range(ranks))).float()
    checked = slice(None)
    if options.goal is Goal.REDUCE_SCATTER:
        checked = _shard(count, rank, ranks)
    elif options.goal is Goal.ALL_GATHER:
        right = (values + torch.arange(count) // (count // ranks)).float()
    found: dict[str, list[_Cost]] = {name: [] for name in ways}
    for number in range(options.rounds + 1):
        turns = list(ways)
        first = number % len(turns)
        for name in turns[first:] + turns[:first]:
            buffer = mine.clone()
            began, cpu = clock.start_together(), time.process_time()
            if rank in options.late_ranks:
                time.sleep(max(0.0, began + late - clock.now()))
            ways[name](buffer)
            own = torch.tensor([time.process_time() - cpu], dtype=torch.float64)
            spent = clock.latest(clock.now()) - began - late
            dist.all_reduce(own)
            if not torch.equal(buffer[checked], right[checked]):
                raise AdaptraError(f"{name} of {4 * count} bytes gave wrong numbers")
            if number:
                found[name].append(_Cost(spent, float(own)))
    return found


def _shard(count: int, rank: int, ranks: int) -> slice:
    return slice(rank * count // ranks, (rank + 1) * count // ranks)


def _native(goal: Goal, buffer: torch.Tensor) -> None:
    """What torch runs over gloo, into the `buffer` itself, as Megatron calls it."""
    mine = buffer[_shard(len(buffer), dist.get_rank(), dist.get_world_size())]
    if goal is Goal.ALL_REDUCE:
        dist.all_reduce(buffer)
    elif goal is Goal.REDUCE_SCATTER:
        dist.reduce_scatter_tensor(mine, buffer)
    else:
        dist.all_gather_into_tensor(buffer, mine)


def _row(
    options: AllReduceOptions,
    nbytes: int,
    late: float,
    name: str,
    plan: CollectivePlan | None,
    costs: dict[str, list[_Cost]],
) -> dict[str, Any]:
    medians = {way: median(cost.seconds for cost in found) for way, found in costs.items()}
    seconds = sorted(cost.seconds for cost in costs[name])
    quarter = len(seconds) // 4
    return {
        "algorithm": name,
        "ranks": options.ranks,
        "bytes": nbytes,
        "late_ms": 1e3 * late,
        "late_ranks": list(options.late_ranks),
        "k": plan.pieces if plan else None,
        "ms_after_arrival": 1e3 * medians[name],
        "spread_ms": 1e3 * (seconds[-1 - quarter] - seconds[quarter]),
        "predicted_ms": _predicted(options, nbytes, late, plan),
        "ratio_to_ring": medians[RING] / medians[name] if RING in medians else None,
        "ratio_to_native": medians[NATIVE] / medians[name] if NATIVE in medians else None,
        "cpu_ms": 1e3 * median(cost.cpu for cost in costs[name]),
    }


def _predicted(
    options: AllReduceOptions, nbytes: int, late: float, plan: CollectivePlan | None
) -> float | None:
    """Milliseconds by the clock of ports; None where there is no plan, or no rate is known."""
    ports = options.clock()
    if plan is None or ports is None:
        return None
    arrivals = [late if rank in options.late_ranks else 0.0 for rank in range(options.ranks)]
    return 1e3 * run_on_ports(plan, nbytes, ports, arrivals).after_arrival
