"""One event loop for all that a laboratory waits for: output, answers, ended processes, packets.

Its own output may be read slowly, or by nobody: what moves packets does not wait for it.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

_TICK = 0.05  # seconds between two looks at the time when nothing moves
_AT_ONCE = select.PIPE_BUF  # bytes that a pipe takes without a wait, if it takes any
_MOST = 1 << 20  # bytes that may be left to write


class Loop:
    """Calls a function for each descriptor that can be read, and `work` in every turn.

    `work`: to be set; does what is due, and returns the seconds until it has to be called again.
    """

    def __init__(self) -> None:
        self.work: Callable[[], float] = lambda: _TICK
        self._poll = select.epoll()
        self._watched: dict[int, Callable[[], object]] = {}

    def watch(self, fd: int, ready: Callable[[], object]) -> None:
        """Call `ready` whenever the descriptor `fd` can be read or its peer has closed."""
        self._watched[fd] = ready
        self._poll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        """Forget the descriptor `fd`; nothing if it is not watched."""
        if self._watched.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def run(self, until: Callable[[], bool], seconds: float) -> bool:
        """Run until `until()` is true, but for `seconds` at most; returns whether it is."""
        end = time.monotonic() + seconds
        while not until():
            if time.monotonic() >= end:
                return False
            for fd, _ in self._poll.poll(min(_TICK, self.work())):
                if ready := self._watched.get(fd):  # a call in this turn may have unwatched it
                    ready()
        return True

    def close(self) -> None:
        """Close the epoll descriptor; those that were watched stay open."""
        self._poll.close()


class Output:
    """Keeps what the descriptor `fd`, which other processes share, does not take yet."""

    def __init__(self, fd: int) -> None:
        self._fd, self._left = fd, bytearray()

    def write(self, data: bytes) -> None:
        """Have `data` written by and by."""
        self._left += data

    def full(self) -> bool:
        """Write what is taken now; whether so much is left that no more should come."""
        while self._left and select.select([], [self._fd], [], 0)[1]:
            self._write()
        return len(self._left) > _MOST

    def drain(self) -> None:
        """Write all that is left, however long that takes."""
        while self._left:
            self._write()

    def _write(self) -> None:
        del self._left[: os.write(self._fd, self._left[:_AT_ONCE])]
