"""The interface of a device, a GPU or its stand-in on the host: marks, and memory of messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Mark(Protocol):
    """A moment of a stream: when all that was launched before has run.

    `recorded`: when it was asked for, in seconds of the host's monotonic clock.
    """

    __slots__ = ()  # so that a HostMark has only its own

    recorded: float

    def at(self) -> float | None:
        """Return when the stream passed it, on the same clock; None while it has not.

        Never waits. None for ever where `fault` says why.
        """

    @property
    def fault(self) -> str:
        """The reason that there will never be a moment; else empty."""


@dataclass(frozen=True)
class Memory:
    """Bytes of the host that copies take.

    `held`: pinned now; `used`: of these, by messages under way; `peak`: most held since the last
    `new_peak`; `over`: most above the limit since then. `copied`: why what was pinned is copied
    once more; empty where it is not. `unpinned`: why memory that is not pinned has served, which
    counts as if it were; empty where none has.
    """

    held: int = 0
    used: int = 0
    peak: int = 0
    over: int = 0
    copied: str = ""
    unpinned: str = ""


class Device(Protocol):
    """A device runs compute. `behind`: after the host launches it, so that marks are read later."""

    name: str
    behind: bool

    def mark(self) -> Mark:
        """Mark what was launched on the calling thread's current stream; takes microseconds."""

    def marker(self) -> Callable[[], Mark]:
        """Return a function that marks the calling thread's current stream; for marks in a row."""

    def anchor(self) -> None:
        """Tie the GPU's clock to the host's, now; once per iteration."""

    def close(self) -> None:
        """Give everything back; may be called twice."""


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
