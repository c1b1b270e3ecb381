"""The users of cores on a rank's host, while its training waits for a core."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from megatron_adaptra.base.processes import cpu_seconds, descendants, process_tree

_SHOWN = 0.05  # cores; less is left out of sentences
_HOGS = 0.1  # of the cores that the training itself gets; less makes no rank late
_STAT = Path("/proc/stat")
# Fields of its first line: idle and waiting for a disk; taken by the host.
_IDLE, _STEAL = (3, 4), 7
_COUNTED = 8  # what runs in guests, behind these, is in user time already
_BITS, _PARTS = 13, 10  # of a packed number of cores: its bits, and its parts per core


class HostUse(NamedTuple):
    """A host use holds who computed on the host of one rank, in a span of some iterations.

    Args:
        queued: share of the time that the rank's training thread waited for a core, 0 to 1.
        own: cores that the rank's process used.
        helpers: cores that processes below it used, such as data workers.
        job: cores that other ranks of its launcher used, with the processes below them.
        others: cores that all other processes of the machine used.
        cores: cores that the machine has.
    """

    queued: float
    own: float
    helpers: float
    job: float
    others: float
    cores: int

    @property
    def hogs(self) -> bool:
        """True where helpers take cores from their own training."""
        return self.helpers > _HOGS * self.own

    def packed(self) -> int:
        """Return a number below 2 ** 63 for `unpacked`: larger for a longer wait, to a percent.

        Cores are rounded to tenths; those that its own process uses are left out.
        """
        number = round(100 * min(1.0, max(0.0, self.queued)))
        for cores in (self.helpers, self.job, self.others, self.cores / _PARTS):
            tenths = round(_PARTS * max(0.0, cores))
            number = number << _BITS | min(tenths, (1 << _BITS) - 1)
        return number

    @classmethod
    def unpacked(cls, number: int) -> HostUse:
        """Return the use of which `packed` has made a `number`, at least 0."""
        parts = []
        for _ in range(4):
            number, part = number >> _BITS, number & ((1 << _BITS) - 1)
            parts.append(part)
        cores, others, job, helpers = parts
        return cls(number / 100, 0.0, helpers / _PARTS, job / _PARTS, others / _PARTS, cores)

    def in_words(self) -> str:
        """Describe who uses the cores that the training waits for, as part of a sentence."""
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


class MachineTime(NamedTuple):
    """A machine time holds CPU seconds of all cores since boot: all, not idle, and stolen."""

    total: float
    busy: float
    steal: float

    @classmethod
    def now(cls) -> MachineTime | None:
        """Return the present time; None where the system does not report it."""
        try:
            line = _STAT.read_text(encoding="ascii").partition("\n")[0].split()[1:]
            ticks = [int(word) for word in line[:_COUNTED]]
            unit = os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError):
            return None
        if len(ticks) < _COUNTED:
            return None
        total = sum(ticks)
        busy = total - sum(ticks[i] for i in _IDLE)
        return cls(total / unit, busy / unit, ticks[_STEAL] / unit)


class _Sample(NamedTuple):
    at: float
    machine: MachineTime
    own: float
    below: dict[int, float]  # CPU seconds, by process below this one
    beside: dict[int, float]  # CPU seconds, by other process below the launcher


class HostMeter:
    """A host meter measures from `begin` to `end`; each looks at all processes: milliseconds."""

    def __init__(self) -> None:
        self._began: _Sample | None = None

    def begin(self) -> None:
        """Begin a span."""
        self._began = self._sample()

    def end(self, queued: float) -> HostUse | None:
        """Return the use since `begin`; None where the system does not report it.

        `queued`: as for HostUse; the caller measures it. Processes that start within the span
        count, those that end within it do not.
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
