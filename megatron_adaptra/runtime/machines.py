"""Which processes of a job share a clock, and which can see each other."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_AGREE = 1e-3  # seconds by which the clocks of one machine may seem to differ


class Place(NamedTuple):
    """Where a process runs.

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
    def here(cls) -> Place:
        """Of this process."""
        kernel, processes = socket.gethostname(), ""
        with contextlib.suppress(OSError):
            kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        with contextlib.suppress(OSError):
            processes = os.readlink("/proc/self/ns/pid")
        return cls(kernel, _booted(), processes, os.getpid(), socket.gethostname())


def clocks(places: Sequence[Place]) -> list[str]:
    """By rank an identity of its clock: the same for ranks whose monotonic clocks agree."""
    found: list[str] = []
    for place in places:
        same = (known for known, other in zip(found, places, strict=False) if _share(place, other))
        found.append(next(same, f"{place.kernel} {len(found)}"))
    return found


def neighbours(places: Sequence[Place], rank: int) -> dict[int, int]:
    """The processes that `rank` can see, itself included, by rank."""
    here = places[rank]
    return {
        other: place.pid
        for other, place in enumerate(places)
        if _share(here, place) and here.processes == place.processes
    }


def _share(one: Place, other: Place) -> bool:
    return one.kernel == other.kernel and abs(one.booted - other.booted) < _AGREE


def _booted() -> float:
    """Of several looks at both clocks the one that nothing has come between."""
    looks = []
    for _ in range(20):
        before, wall, after = time.monotonic(), time.time(), time.monotonic()
        looks.append((after - before, wall - (before + after) / 2))
    return min(looks)[1]
