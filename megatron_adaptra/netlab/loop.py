"""One event loop for all that a laboratory waits for: output, answers, ended processes, packets."""

from __future__ import annotations

import select
import time
from collections.abc import Callable

_TICK = 0.05  # seconds between two looks at the time when nothing moves


class Loop:
    """`work`: called once a turn; returns the seconds that it can wait for the next one."""

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
        """Go on until `until()`, but for `seconds` at most; whether `until` came true."""
        end = time.monotonic() + seconds
        while not until():
            if time.monotonic() >= end:
                return False
            for fd, _ in self._poll.poll(min(_TICK, self.work())):
                if ready := self._watched.get(fd):  # another one may just have let go of it
                    ready()
        return True

    def close(self) -> None:
        """Let go of the kernel's part."""
        self._poll.close()
