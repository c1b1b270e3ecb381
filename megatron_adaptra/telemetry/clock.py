"""When something happened, on the host or on a device that runs behind it."""

from __future__ import annotations

import time
from typing import Protocol


class Mark(Protocol):
    """A moment in the work of whatever runs the ops. `launched`: when the host came to it.

    Seconds on the monotonic clock.
    """

    launched: float

    def at(self) -> float | None:
        """When the work had come to it; None where that is not known, yet or for good."""
        ...


class Clock(Protocol):
    """Makes marks. `device`: they are of a device, so that their times are known later."""

    device: bool

    def mark(self) -> Mark:
        """Here and now in the work that the calling thread hands out; waits for nothing."""
        ...


class _HostMark:
    __slots__ = ("launched",)

    def __init__(self) -> None:
        self.launched = time.monotonic()

    def at(self) -> float | None:
        return self.launched


class HostClock:
    """Of ops that the calling thread runs itself."""

    device = False

    def mark(self) -> Mark:
        """The time of the call."""
        return _HostMark()


HOST = HostClock()
