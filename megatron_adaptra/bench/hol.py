"""Head of line: how fast a rank computes while what it sends crosses a slow link.

In the compute queue a rank waits for each send before it goes on, as stock Megatron does; off it,
the transport carries the message while the rank computes.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megatron_adaptra.bench.clock import in_turns
from megatron_adaptra.bench.options import Options
from megatron_adaptra.bench.paths import TIMEOUT, open_endpoint
from megatron_adaptra.emulate.links import LinkEmulator
from megatron_adaptra.emulate.rules import parse_rules
from megatron_adaptra.transport.base import Transport, Work
from megatron_adaptra.transport.engine.engine_wire import EngineWire
from megatron_adaptra.transport.wire import GlooWire, Wire

EMULATED = "40ms"  # the link where there is no laboratory
_STEP = 0.01  # seconds of compute before a message, about
_STEPS = 12  # of a turn
_SIDE = 256  # of the matrices
IN, OFF = "in", "off"
_Arm = tuple[str, str]  # transport and queue; two empty words for no messages at all


def rows(options: Options, rank: int) -> list[dict[str, Any]]:
    """A row for each size and arm; `rank` 0 computes, and 1 receives and has no rows."""
    rules = [] if options.link else parse_rules(f"0-1:{EMULATED}", 2)
    machine = f"of {rank}" if options.link else "here"
    wires: list[Wire] = [GlooWire(), EngineWire(open_endpoint("hol", rank, machine), rank)]
    transports = {
        wire.name: wire.transport("bench", [0, 1], [(0, 1), (1, 0)], LinkEmulator(rank, rules))
        for wire in wires
    }
    try:
        compute = _Compute()
        found = []
        for nbytes in options.sizes:
            found += _rows(options, rank, nbytes, transports, compute)
        dist.barrier()
        return found
    finally:
        for transport in transports.values():
            transport.close()
        for wire in wires:
            wire.close()


def _rows(
    options: Options, rank: int, nbytes: int, transports: dict[str, Transport], compute: _Compute
) -> list[dict[str, Any]]:
    arms: list[_Arm] = [("", "")] + [(name, queue) for name in transports for queue in (IN, OFF)]
    speeds: dict[_Arm, list[float]] = {arm: [] for arm in arms}
    for _, arm in in_turns(arms, options.rounds):
        dist.barrier()
        transport = transports.get(arm[0])
        if rank == 0:
            speeds[arm].append(_sender(transport, arm[1] == IN, nbytes, compute))
        elif transport is not None:
            _receiver(transport, nbytes)
    if rank:
        return []
    medians = {arm: median(each) for arm, each in speeds.items()}
    return [
        {
            "transport": name,
            "queue": queue,
            "bytes": nbytes,
            "steps_per_s": speed,
            "ratio_to_alone": speed / medians["", ""],
        }
        for (name, queue), speed in medians.items()
        if name
    ]


class _Compute:
    """Steps of the same work."""

    def __init__(self) -> None:
        self._a = torch.rand(_SIDE, _SIDE)
        self._out = torch.empty_like(self._a)
        self._count, spent = 1, 0.0
        self.step()  # the first one prepares
        while spent < _STEP / 2:
            self._count *= 2
            begin = time.thread_time()  # whatever else the core has to do
            self.step()
            spent = time.thread_time() - begin

    def step(self) -> None:
        for _ in range(self._count):
            torch.mm(self._a, self._a, out=self._out)


def _sender(transport: Transport | None, waits: bool, nbytes: int, compute: _Compute) -> float:
    """Steps per second of a turn; then the messages have their time to arrive."""
    message = torch.zeros(nbytes, dtype=torch.uint8)
    sent: list[Work] = []
    begin = time.perf_counter()
    for number in range(_STEPS):
        compute.step()
        if transport is not None:
            sent.append(transport.isend(message, 1, number))
            if waits:
                sent[-1].wait(TIMEOUT)
    speed = _STEPS / (time.perf_counter() - begin)
    for work in sent:
        work.wait(TIMEOUT)
    return speed


def _receiver(transport: Transport, nbytes: int) -> None:
    """All receives are posted ahead: gloo moves nothing before."""
    buffers = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(_STEPS)]
    posted = deque(transport.irecv(buffer, 0, n) for n, buffer in enumerate(buffers))
    while posted:
        posted.popleft().wait(TIMEOUT)
