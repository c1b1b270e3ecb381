"""The locations of a job's processes: which share a clock, and which can see each other."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_AGREE = 1e-3  # seconds by which `booted` may differ between processes of one machine


class ProcessLocation(NamedTuple):
    """A process location describes where a process runs.

    `kernel`: the same for two that share a kernel, but perhaps for copies of a virtual machine,
    too. `booted`: the wall clock at the monotonic clock's zero, in seconds. `processes`: the same
    for two that share a kernel and see each other's `pid`. `host`: its name, for people.
    """

    kernel: str
    booted: float
    processes: str
    pid: int
    host: str = ""

    @classmethod
    def here(cls) -> ProcessLocation:
        """Return the location of this process."""
        kernel, processes = socket.gethostname(), ""
        with contextlib.suppress(OSError):
            kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        with contextlib.suppress(OSError):
            processes = os.readlink("/proc/self/ns/pid")
        return cls(kernel, _booted(), processes, os.getpid(), socket.gethostname())


def clock_ids(locations: Sequence[ProcessLocation]) -> list[str]:
    """Return, by rank, an identity of its clock, equal for ranks whose monotonic clocks agree."""
    found: list[str] = []
    for location in locations:
        seen = zip(found, locations, strict=False)
        same = (known for known, other in seen if _share_clock(location, other))
        found.append(next(same, f"{location.kernel} {len(found)}"))
    return found


def visible_pids(locations: Sequence[ProcessLocation], rank: int) -> dict[int, int]:
    """Return, by rank, the process ids of the processes that `rank` can see, with its own."""
    here = locations[rank]
    return {
        other: location.pid
        for other, location in enumerate(locations)
        if _share_clock(here, location) and here.processes == location.processes
    }


def _share_clock(one: ProcessLocation, other: ProcessLocation) -> bool:
    return one.kernel == other.kernel and abs(one.booted - other.booted) < _AGREE


def _booted() -> float:
    """Return the wall clock's time at the monotonic clock's 0, by the quickest of 20 readings."""
    looks = []
    for _ in range(20):
        before, wall, after = time.monotonic(), time.time(), time.monotonic()
        looks.append((after - before, wall - (before + after) / 2))
    return min(looks)[1]
