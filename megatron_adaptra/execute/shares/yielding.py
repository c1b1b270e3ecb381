"""Lower priority for a rank's child processes that take cores from the rank's own training.

Data workers and writers of checkpoints compute beside the training. Where its thread waits for a
core they get a lower priority, so that it waits less. Other processes are not touched.
"""

from __future__ import annotations

import contextlib
import os

from megatron_adaptra.base.processes import descendants
from megatron_adaptra.measure.host_use import HostMeter, HostUse

WAITS = 0.1  # share of an iteration: a rank whose thread waits so long for a core is late
HOLDS = 3  # iterations in a row that show it, before the host is looked at ...
SPAN = 4  # ... for so many, ...
PAUSE = 16  # ... and then no more for so many
NICE = 10  # more than the training: about a ninth of its time on a core that both want


class Yielding:
    """A yielder lowers the priority of a rank's child processes while its thread lacks a core.

    `use`: who computed on its host in the last span; None while it need not wait. A process
    without privileges cannot raise a priority again, so that a lower one stays.
    """

    def __init__(self) -> None:
        self.use: HostUse | None = None
        self._meter = HostMeter()
        self._seen = 0
        self._queued = self._seconds = 0.0  # in the span

    def ended(self, queued: float, seconds: float) -> None:
        """Record an iteration of `seconds`, `queued` of which its thread waited for a core."""
        if not seconds > 0 or queued < WAITS * seconds:
            self._seen, self.use = 0, None
            return
        self._seen += 1
        if self._seen < HOLDS:
            return
        if self._seen == HOLDS:
            self._queued = self._seconds = 0.0
            self._meter.begin()
            return
        self._queued += queued
        self._seconds += seconds
        if self._seen < HOLDS + SPAN:
            return
        self.use = self._meter.end(min(1.0, self._queued / self._seconds))
        self._seen = -PAUSE  # then looked at again: others may have been started
        if self.use is not None and self.use.hogs:
            lower_priority(descendants())


def lower_priority(pids: set[int]) -> None:
    """Lower the priority of all threads of `pids`, where they still run and have a higher one."""
    nice = os.getpriority(os.PRIO_PROCESS, 0) + NICE  # the kernel takes 19 for what is more
    for pid in pids:
        with contextlib.suppress(OSError):
            for thread in map(int, os.listdir(f"/proc/{pid}/task")):
                if os.getpriority(os.PRIO_PROCESS, thread) < nice:
                    os.setpriority(os.PRIO_PROCESS, thread, nice)
