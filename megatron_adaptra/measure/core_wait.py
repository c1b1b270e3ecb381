"""How long a thread has waited for a core: that, and not that it was suspended or slept.

Linux counts it per thread (`/proc/thread-self/schedstat`, Documentation/scheduler/sched-stats.rst:
nanoseconds on a core, nanoseconds in the queue for one, times that it ran).
"""

from __future__ import annotations

import os
import threading

_FILE = "/proc/thread-self/schedstat"
_LONGEST = 100  # bytes of what is in it
_NANO = 1e-9


class CoreWait(threading.local):
    """Of the thread that asks, each its own; asking takes about a microsecond."""

    def __init__(self) -> None:
        self._opened: tuple[int, int] | None = None  # process, descriptor

    def __call__(self) -> float | None:
        """Seconds in the queue for a core so far; None where the kernel does not count them."""
        try:
            return int(os.pread(self._descriptor(), _LONGEST, 0).split()[1]) * _NANO
        except (OSError, IndexError, ValueError):
            return None

    def _descriptor(self) -> int:
        process = os.getpid()
        if self._opened is None or self._opened[0] != process:
            self.close()  # what was open before a fork is of the thread that has forked
            self._opened = process, os.open(_FILE, os.O_RDONLY | os.O_CLOEXEC)
        return self._opened[1]

    def close(self) -> None:
        """Close what this thread reads; it is opened again when it is asked."""
        if self._opened is not None:
            os.close(self._opened[1])
            self._opened = None

    def __del__(self) -> None:
        self.close()
