"""Where there is no GPU: the host computes, so that a mark is passed when it is made."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron_adaptra.device.base import Device, Mark


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

    def mark(self) -> HostMark:
        return HostMark()

    def marker(self) -> Callable[[], HostMark]:
        return self.mark

    def anchor(self) -> None:
        """Nothing: there is one clock."""

    def close(self) -> None:
        pass


HOST = HostDevice()
