"""The machine's load by the demo's ranks and by all other processes, from /proc/stat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_adaptra.execute.process_location import ProcessLocation
from megatron_adaptra.measure.host_use import MachineTime


class Sample(NamedTuple):
    """A sample holds the CPU seconds of this process and of its machine before `iteration`."""

    iteration: int
    own: float
    machine: MachineTime | None


class Load(NamedTuple):
    """A load holds shares of a machine's CPU time, 0 to 1: of the run's ranks and of all others.

    `steal`: the part of `others` that other virtual machines of the same host took.
    """

    own: float
    others: float
    steal: float


def load_of(
    samples: Sequence[Sequence[Sample]], kernels: Sequence[str], first: int, end: int
) -> Load | None:
    """Return the load of rank 0's machine in iterations `first` up to, not including, `end`.

    `samples`: by rank, all taken before the same iterations; the nearest around the span count.
    `kernels`: by rank, see `kernel`. None where the machine does not report it.
    """
    rows = [row for row, kernel in zip(samples, kernels, strict=True) if kernel == kernels[0]]
    taken = [sample.iteration for sample in rows[0]]
    before = max((k for k, i in enumerate(taken) if i <= first), default=None)
    after = min((k for k, i in enumerate(taken) if i >= end), default=None)
    if before is None or after is None or before >= after:
        return None
    start, stop = rows[0][before].machine, rows[0][after].machine
    if start is None or stop is None or stop.total <= start.total:
        return None
    total = stop.total - start.total
    own = sum(row[after].own - row[before].own for row in rows) / total
    busy, steal = (stop.busy - start.busy) / total, (stop.steal - start.steal) / total
    return Load(min(own, 1.0), max(0.0, busy - own), max(0.0, steal))


def kernel() -> str:
    """Return a text that is the same for all processes of a machine."""
    return ProcessLocation.here().kernel
