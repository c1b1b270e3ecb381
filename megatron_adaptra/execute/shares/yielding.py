"""What a rank's process has started yields where it takes cores from the rank's own training.

Data workers and writers of checkpoints compute beside the training. Where its thread waits for a
core they get a lower priority, so that it waits less. Nothing of others is touched.
"""

from __future__ import annotations

import contextlib
import os

from megatron_adaptra.base.processes import descendants
from megatron_adaptra.measure.host_use import HostMeter, HostUse

WAITS = 0.1  # share of an iteration for which its thread waits for a core, from which it is late
HOLDS = 3  # iterations in a row that show it, before the host is looked at ...
SPAN = 4  # ... for so many, ...
PAUSE = 16  # ... and then no more for so many
NICE = 10  # more than the training: about a ninth of its time on a core that both want


class Yielding:
    """Of one rank. `use`: who computed on its host in the last span, None while it need not wait.

    A process without privileges cannot take a lower priority back, so it is for good.
    """

    def __init__(self) -> None:
        self.use: HostUse | None = None
        self._meter = HostMeter()
        self._seen = 0
        self._queued = self._seconds = 0.0  # in the span

    def ended(self, queued: float, seconds: float) -> None:
        """An iteration is over, in `seconds`, `queued` of which its thread waited for a core."""
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
    """All threads of processes `pids` yield; what has ended, or yields already, stays as it is."""
    nice = os.getpriority(os.PRIO_PROCESS, 0) + NICE  # the kernel takes 19 for what is more
    for pid in pids:
        with contextlib.suppress(OSError):
            for thread in map(int, os.listdir(f"/proc/{pid}/task")):
                if os.getpriority(os.PRIO_PROCESS, thread) < nice:
                    os.setpriority(os.PRIO_PROCESS, thread, nice)
