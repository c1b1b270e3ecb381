"""A sum of a few numbers over all ranks: torch's all-reduce over gloo against our all-gathers."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import AdaptraError
from megatron_adaptra.bench.clock import Clock, in_turns
from megatron_adaptra.bench.options import Options
from megatron_adaptra.bench.paths import TIMEOUT, open_endpoint
from megatron_adaptra.bench.sizes import ALL_GATHER, ALL_REDUCE, busbw
from megatron_adaptra.execute.small.all_gather import AllGather, FlatAllGather
from megatron_adaptra.transport.engine.engine_wire import EngineWire
from megatron_adaptra.transport.wire import GlooWire, Wire

_CALLS = 20  # in a row
_Sum = Callable[[torch.Tensor], torch.Tensor]


def rows(options: Options, rank: int) -> list[dict[str, Any]]:
    """Measure as `rank`: a row per size and way to sum. Over a link each call is timed alone."""
    clock = Clock(options)
    machine = f"of {rank}" if options.link else clock.machines[rank]
    wires: list[Wire] = [GlooWire(), EngineWire(open_endpoint("collective", rank, machine), rank)]
    all_ranks = range(options.ranks)
    gathers = {
        wire.name: FlatAllGather(
            wire.group("bench", all_ranks, waits.CONNECT),
            [f"rank {member}" for member in all_ranks],
            max(options.sizes),
            TIMEOUT,
        )
        for wire in wires
    }
    ways: dict[tuple[str, str], _Sum] = {(ALL_REDUCE, "gloo"): _all_reduce}
    ways |= {(ALL_GATHER, name): _gathered(gather) for name, gather in gathers.items()}
    try:
        found = []
        for nbytes in options.sizes:
            costs = _costs(ways, nbytes // 4, options, clock)
            for (collective, transport), cost in costs.items():
                found.append(
                    {
                        "collective": collective,
                        "transport": transport,
                        "ranks": options.ranks,
                        "bytes": nbytes,
                        "us_per_call": 1e6 * cost,
                        "busbw_gb_per_s": busbw(collective, nbytes, cost, options.ranks),
                        "ratio_to_gloo": costs[ALL_REDUCE, "gloo"] / cost,
                    }
                )
        dist.barrier()  # no rank closes before all have received
        return found
    finally:
        for gather in gathers.values():
            gather.close()
        for wire in wires:
            wire.close()


def _costs(
    ways: dict[tuple[str, str], _Sum], count: int, options: Options, clock: Clock
) -> dict[tuple[str, str], float]:
    """Return by way the median seconds of a sum of `count` numbers, until the last rank has it."""
    calls = 1 if options.link else _CALLS
    mine = torch.arange(count, dtype=torch.float32) + dist.get_rank()
    right = options.ranks * torch.arange(count) + sum(range(options.ranks))
    seconds: dict[tuple[str, str], list[float]] = {}
    for number, way in in_turns(list(ways), options.rounds + 1):
        begin = clock.start_together()
        for _ in range(calls):
            total = ways[way](mine)
        spent = (clock.latest(clock.now()) - begin) / calls
        if not torch.equal(total, right.float()):
            raise AdaptraError(f"{' over '.join(way)} gave {total}, not {right}")
        if number:  # the first one opens gloo's connections
            seconds.setdefault(way, []).append(spent)
    return {way: median(each) for way, each in seconds.items()}


def _all_reduce(mine: torch.Tensor) -> torch.Tensor:
    total = mine.clone()
    dist.all_reduce(total)
    return total


def _gathered(gather: AllGather) -> _Sum:
    def total(mine: torch.Tensor) -> torch.Tensor:
        parts = gather.run(mine.view(torch.uint8))
        return torch.stack([part.view(torch.float32) for part in parts]).sum(0)

    return total
