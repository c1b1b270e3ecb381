"""Where there is no GPU: the host computes, so that a mark is passed when it is made."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron_adaptra.device.base import Calls, Device, Mark


class HostMark(Mark):
    """The moment of the call."""

    __slots__ = ("recorded",)
    fault = ""

    def __init__(self) -> None:
        self.recorded = time.monotonic()

    def at(self) -> float:
        return self.recorded


class HostDevice(Device):
    """The host, which runs what it launches at once."""

    name, behind = "cpu", False

    def __init__(self) -> None:
        self._marks = 0

    def mark(self) -> HostMark:
        self._marks += 1
        return HostMark()

    def marker(self) -> Callable[[], HostMark]:
        return self.mark

    def anchor(self) -> None:
        """Nothing: there is one clock."""

    def calls(self) -> Calls:
        return Calls(marks=self._marks)

    def close(self) -> None:
        pass


HOST = HostDevice()
