"""Who computes on a rank's host, while its training waits for a core."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from megatron_adaptra.base.processes import cpu_seconds, descendants, process_tree
from megatron_adaptra.measure.machine_time import MachineTime

_SHOWN = 0.05  # cores; less is left out of sentences
_HOGS = 0.1  # of the cores that the training itself gets; less makes nobody late
_BITS, _PARTS = 13, 10  # of a number of cores, in tenths, where a use is packed


class HostUse(NamedTuple):
    """Of one rank, in a span of some iterations.

    Args:
        queued: share of the time that its training thread has waited for a core, 0 to 1.
        own: cores that its process computes on.
        helpers: that processes below it do, such as data workers.
        job: that ranks beside it do, which its launcher has started, with theirs.
        others: that all else on the machine does.
        cores: of the machine.
    """

    queued: float
    own: float
    helpers: float
    job: float
    others: float
    cores: int

    @property
    def hogs(self) -> bool:
        """Whether helpers take cores from their own training."""
        return self.helpers > _HOGS * self.own

    def packed(self) -> int:
        """A number below 2 ** 63 for `unpacked`; that of who waits longer is larger, to a percent.

        Cores are rounded to tenths; those that its own process uses are left out.
        """
        number = round(100 * min(1.0, max(0.0, self.queued)))
        for cores in (self.helpers, self.job, self.others, self.cores / _PARTS):
            tenths = round(_PARTS * max(0.0, cores))
            number = number << _BITS | min(tenths, (1 << _BITS) - 1)
        return number

    @classmethod
    def unpacked(cls, number: int) -> HostUse:
        """What `packed` has made a `number` of, which is not negative."""
        parts = []
        for _ in range(4):
            number, part = number >> _BITS, number & ((1 << _BITS) - 1)
            parts.append(part)
        cores, others, job, helpers = parts
        return cls(number / 100, 0.0, helpers / _PARTS, job / _PARTS, others / _PARTS, cores)

    def in_words(self) -> str:
        """Who uses the cores that the training waits for, as part of a sentence."""
        users = [
            (cores, who)
            for cores, who in (
                (self.helpers, "its own processes, which yield,"),
                (self.job, "other ranks of the job"),
                (self.others, "processes that are not of this job"),
            )
            if cores >= _SHOWN
        ]
        waits = f"it waits for a core for {self.queued:.0%} of the time"
        if not users:
            return waits
        used = [f"{who} use {cores:.1f}" for cores, who in sorted(users, reverse=True)]
        return f"{waits}: {', '.join(used)} of {self.cores} cores"


class _Sample(NamedTuple):
    at: float
    machine: MachineTime
    own: float
    below: dict[int, float]  # by process below this one
    beside: dict[int, float]  # below the launcher, but not this one nor below it


class HostMeter:
    """Measures a span from `begin` to `end`; each takes a look at all processes, milliseconds."""

    def __init__(self) -> None:
        self._began: _Sample | None = None

    def begin(self) -> None:
        """A span begins."""
        self._began = self._sample()

    def end(self, queued: float) -> HostUse | None:
        """It is over; None where the system does not report it.

        `queued`: as for HostUse, which is counted elsewhere. What processes compute that begin in
        the span counts, what those do that end in it does not.
        """
        before, now, self._began = self._began, self._sample(), None
        if before is None or now is None or now.at <= before.at:
            return None
        seconds = now.at - before.at
        own = now.own - before.own
        helpers, job = _computed(before.below, now.below), _computed(before.beside, now.beside)
        busy = now.machine.busy - before.machine.busy
        others = max(0.0, busy - own - helpers - job)
        each = (own / seconds, helpers / seconds, job / seconds, others / seconds)
        return HostUse(queued, *each, os.cpu_count() or 1)

    def _sample(self) -> _Sample | None:
        machine = MachineTime.now()
        if machine is None:
            return None
        tree, parent = process_tree(), os.getppid()
        below = descendants(tree=tree)
        beside = descendants(parent, tree) - below - {os.getpid()} if parent > 1 else set()
        return _Sample(
            time.monotonic(), machine, time.process_time(),
            {pid: cpu_seconds(pid) for pid in below}, {pid: cpu_seconds(pid) for pid in beside},
        )  # fmt: skip


def _computed(before: dict[int, float], now: dict[int, float]) -> float:
    return sum(max(0.0, seconds - before.get(pid, 0.0)) for pid, seconds in now.items())
