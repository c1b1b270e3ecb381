"""The time that a thread has waited for a core, without the time it slept or was suspended.

Linux counts it per thread (`/proc/thread-self/schedstat`, Documentation/scheduler/sched-stats.rst:
nanoseconds on a core, nanoseconds in the queue for one, times that it ran).
"""

from __future__ import annotations

import os
import threading

_FILE = "/proc/thread-self/schedstat"
_LONGEST = 100  # bytes that the file has at most
_NANO = 1e-9


class CoreWait(threading.local):
    """A core wait reads, in about a microsecond, how long the calling thread waited for a core."""

    def __init__(self) -> None:
        self._opened: tuple[int, int] | None = None  # process, descriptor

    def __call__(self) -> float | None:
        """Return the seconds in the queue so far; None where the kernel does not count them."""
        try:
            return int(os.pread(self._descriptor(), _LONGEST, 0).split()[1]) * _NANO
        except (OSError, IndexError, ValueError):
            return None

    def _descriptor(self) -> int:
        process = os.getpid()
        if self._opened is None or self._opened[0] != process:
            self.close()  # after a fork, the open file is still that of the parent's thread
            self._opened = process, os.open(_FILE, os.O_RDONLY | os.O_CLOEXEC)
        return self._opened[1]

    def close(self) -> None:
        """Close the file that this thread reads; the next call opens it again."""
        if self._opened is not None:
            os.close(self._opened[1])
            self._opened = None

    def __del__(self) -> None:
        self.close()
